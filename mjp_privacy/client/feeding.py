"""From photographs to what a client feeds its model in a step: augmented, then shuffled.

Settings a, b, c of the paper say what the client feeds its model, and what is scored:

a  phi(grad M(x),  x )    plain image,    scored against the plain image
b  phi(grad M(x~), x~)    shuffled image, scored against the shuffled image
c  phi(grad M(x~), x )    shuffled image, scored against the plain image

Every random choice is drawn for (seed, image, round). Leaving an image out therefore changes
nothing for the others, except for an image that it would have been mixed into.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mjp_privacy.client.config import ClientConfig, local_round
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed, torch_generator
from mjp_privacy.core.registry import Registry
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models.jigsaw import Grid, draw_masks, shuffle_patches

SMALLEST_CROP = 0.7  # side of the smallest crop, relative to the image's
MIXUP_ALPHA = 0.8  # the value that DeiT is trained with


def augmented(
    images: Tensor, image_ids: Sequence[str], kind: str, *, round: int, seed: int
) -> Tensor:
    """The images (m, C, H, W) in [0, 1] as they enter this round.

    flip   each is mirrored left to right with probability 1/2
    crop   70 to 100 % of height and width, anywhere in the image, enlarged to the whole size;
           rounded to 8 bits, because training pipelines crop the decoded picture and not a float
           tensor
    mixup  a x + (1 - a) y, with y another image of the block and a >= 1/2 from Beta(.8, .8); the
           label stays that of x, the image with the larger weight
    none   as they are
    """
    draws = [
        random.Random(derive_seed("augment", kind, seed, image_id, round)) for image_id in image_ids
    ]
    if kind == "flip":
        flips = torch.tensor([draw.random() < 0.5 for draw in draws])
        return torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images)
    if kind == "crop":
        crops = [_crop(image, draw) for image, draw in zip(images, draws, strict=True)]
        return (torch.cat(crops).clamp(0, 1) * 255).round() / 255
    if kind != "mixup":
        return images
    if len(images) < 2:
        raise UserError(
            "client.augment: mixup needs another image in the block, but this one holds no other. "
            "Give more images, or choose another augmentation."
        )
    mixed = []
    for image, image_id, draw in zip(images, image_ids, draws, strict=True):
        others = [place for place, name in enumerate(image_ids) if name != image_id]
        partner = min(
            others, key=lambda place: derive_seed("mixup", seed, image_id, image_ids[place], round)
        )
        drawn = draw.betavariate(MIXUP_ALPHA, MIXUP_ALPHA)
        share = max(drawn, 1 - drawn)
        mixed.append(share * image + (1 - share) * images[partner])
    return torch.stack(mixed)


def _crop(image: Tensor, draw: random.Random) -> Tensor:
    height, width = image.shape[-2:]
    down = draw.randint(math.ceil(SMALLEST_CROP * height), height)
    across = round(down * width / height)
    top, left = draw.randint(0, height - down), draw.randint(0, width - across)
    part = image[None, :, top : top + down, left : left + across]
    return interpolate(part, size=(height, width), mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class Setting:
    """One of the paper's settings: whether the client shuffles by MJP, and the image that a
    reconstruction is compared with, as fed or from before the shuffle."""

    shuffles: bool
    against: Literal["input", "plain"]


SETTINGS: Registry[Setting] = Registry("setting")
SETTINGS.register("a", Setting(shuffles=False, against="plain"))
SETTINGS.register("b", Setting(shuffles=True, against="input"))
SETTINGS.register("c", Setting(shuffles=True, against="plain"))


@dataclass(frozen=True)
class Feeding:
    """Everything except the images that decides what a model is fed.

    Two equal ones turn the same images into the same input. It holds the whole client
    configuration, so that inputs, gradients and weights can be stored under it as a key.
    """

    client: ClientConfig
    setting: str
    gamma: float
    patch_size: int
    seed: int

    def photographs(self, images: Tensor, image_ids: Sequence[str], round: int) -> Tensor:
        """Images (m, C, H, W) in [0, 1] as they enter a round: augmented, not yet shuffled."""
        return augmented(images, image_ids, self.client.augment, round=round, seed=self.seed)

    def input(
        self, images: Tensor, labels: Tensor, image_ids: Sequence[str], round: int
    ) -> ClientInput:
        """What the model is fed for these images in a round: augmented, then each shuffled by its
        own puzzle, where the setting shuffles.

        With `mask: batch`, all images of a step get the puzzle of its first image; with a
        `plain_share`, some steps are not shuffled at all, drawn for (seed, the step's first image,
        round).
        """
        plain, client, seed = self.photographs(images, image_ids, round), self.client, self.seed
        if not SETTINGS[self.setting].shuffles:
            return ClientInput(plain, labels, tuple(image_ids))
        grid, gamma = Grid.in_pictures(plain, self.patch_size), self.gamma
        mask, permutation = draw_masks(image_ids, grid=grid, gamma=gamma, round=round, seed=seed)
        if client.mask == "batch":
            first = torch.arange(len(mask)) // client.batch * client.batch
            mask, permutation = mask[first], permutation[first]
        if client.plain_share:
            steps = [("plain step", seed, first, round) for first in image_ids[:: client.batch]]
            drawn = [random.Random(derive_seed(*s)).random() < client.plain_share for s in steps]
            unshuffled = torch.tensor(drawn).repeat_interleave(client.batch).unsqueeze(-1)
            mask = mask & ~unshuffled
            permutation = torch.where(unshuffled, torch.arange(grid.patches), permutation)
        shuffled = shuffle_patches(plain, permutation, self.patch_size)
        return ClientInput(shuffled, labels, tuple(image_ids), mask, permutation)

    def order(self, image_ids: Sequence[str], round: int) -> Tensor:
        """Which image stands at each place of a round's batches: all in their own order, but for a
        client that shuffles its images before every round after the first."""
        places = torch.arange(len(image_ids))
        if self.client.partners == "fixed" or round == 0:
            return places
        named = (self.seed, len(image_ids), image_ids[0], round)
        return torch.randperm(len(image_ids), generator=torch_generator("partners", *named))

    def rounds_of_steps(self, round: int) -> list[int]:
        """For each local step of a round, the number to give as `round` to `input`.

        All steps use the same images; each augments and shuffles them anew.
        """
        return [local_round(round, step) for step in range(self.client.steps)]
