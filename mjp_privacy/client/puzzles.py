"""Which puzzle shuffles which image, where a client does not simply draw one for each image.

A puzzle is the mask and the permutation by which MJP shuffles the patches of one image.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.machine import derive_seed
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
    """The setting's input, shuffled again by the client's own rules.

    With `mask: batch`, all images of a step get the puzzle of its first image; with a
    `plain_share`, some steps are not shuffled at all. Other clients keep their input.

    plain (m, C, H, W): the images before the shuffle.
    """
    if inputs.mask is None or inputs.permutation is None:
        return inputs
    if client.mask == "image" and client.plain_share == 0:
        return inputs
    mask, permutation = inputs.mask, inputs.permutation
    if client.mask == "batch":
        first = torch.arange(len(mask)) // client.batch * client.batch
        mask, permutation = mask[first], permutation[first]
    unshuffled = torch.tensor(plain_steps(inputs.image_ids, client, round=round, seed=seed))
    unshuffled = unshuffled.repeat_interleave(client.batch).unsqueeze(-1)
    mask = mask & ~unshuffled
    permutation = torch.where(unshuffled, torch.arange(permutation.shape[-1]), permutation)
    images = shuffle_patches(plain, permutation, patch_size)
    return replace(inputs, images=images, mask=mask, permutation=permutation)


def plain_steps(
    image_ids: Sequence[str], client: ClientConfig, *, round: int, seed: int
) -> list[bool]:
    """For each step whether it is not shuffled, drawn for (seed, its first image, round)."""
    return [
        random.Random(derive_seed("plain step", seed, first, round)).random() < client.plain_share
        for first in image_ids[:: client.batch]
    ]
