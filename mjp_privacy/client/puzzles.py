"""The puzzles of a client's steps, where they are not simply one for each image."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.seeding import derive_seed
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models.jigsaw import shuffle_patches


def step_puzzles(
    inputs: ClientInput,
    plain: Tensor,
    client: ClientConfig,
    *,
    patch_size: int,
    round: int,
    seed: int,
) -> ClientInput:
    """The setting's input with the first image's puzzle for its whole step, or none at all in a
    plain step, as the client has it. plain (m, C, H, W): the images before the shuffle."""
    if inputs.mask is None or inputs.permutation is None:
        return inputs
    if client.mask == "image" and client.plain_share == 0:
        return inputs
    mask, permutation = inputs.mask, inputs.permutation
    if client.mask == "batch":
        first = torch.arange(len(mask)) // client.batch * client.batch
        mask, permutation = mask[first], permutation[first]
    without = torch.tensor(plain_steps(inputs.image_ids, client, round=round, seed=seed))
    without = without.repeat_interleave(client.batch).unsqueeze(-1)
    mask = mask & ~without
    permutation = torch.where(without, torch.arange(permutation.shape[-1]), permutation)
    images = shuffle_patches(plain, permutation, patch_size)
    return replace(inputs, images=images, mask=mask, permutation=permutation)


def plain_steps(
    image_ids: Sequence[str], client: ClientConfig, *, round: int, seed: int
) -> list[bool]:
    """Whether each step is unshuffled, drawn for (seed, the step's first image, round)."""
    return [
        random.Random(derive_seed("plain step", seed, first, round)).random() < client.plain_share
        for first in image_ids[:: client.batch]
    ]
