"""Random changes that a client makes to its images in every round, before the shuffle.

Every random choice is drawn for (seed, image, round). Leaving an image out therefore changes
nothing for the others, except for an image that it would have been mixed into.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed

SMALLEST_CROP = 0.7  # side of the smallest crop, relative to the image's
MIXUP_ALPHA = 0.8  # the value that DeiT is trained with


def augmented(
    images: Tensor, image_ids: Sequence[str], kind: str, *, round: int, seed: int
) -> Tensor:
    """The images (m, C, S, S) in [0, 1] as they enter this round.

    kind: a name in AUGMENTATIONS. `augmented(images, ids, "flip", round=0, seed=0)`.
    """
    return AUGMENTATIONS[kind](images, image_ids, round, seed)


def _rng(kind: str, image_id: str, round: int, seed: int) -> random.Random:
    return random.Random(derive_seed("augment", kind, seed, image_id, round))


def _none(images: Tensor, image_ids: Sequence[str], round: int, seed: int) -> Tensor:
    return images


def _flip(images: Tensor, image_ids: Sequence[str], round: int, seed: int) -> Tensor:
    """Mirror each image left to right with probability 1/2."""
    flips = [_rng("flip", image_id, round, seed).random() < 0.5 for image_id in image_ids]
    return torch.where(torch.tensor(flips).view(-1, 1, 1, 1), images.flip(-1), images)


def _crop(images: Tensor, image_ids: Sequence[str], round: int, seed: int) -> Tensor:
    """A square of 70 to 100 % of the side, anywhere in the image, enlarged to the whole side.

    Rounded to 8 bits, because training pipelines crop the decoded picture and not a float tensor.
    """
    size = images.shape[-1]
    crops = []
    for image, image_id in zip(images, image_ids, strict=True):
        rng = _rng("crop", image_id, round, seed)
        side = rng.randint(round_up(SMALLEST_CROP * size), size)
        top, left = rng.randint(0, size - side), rng.randint(0, size - side)
        part = image[None, :, top : top + side, left : left + side]
        crops.append(interpolate(part, size=(size, size), mode="bilinear", align_corners=False))
    return (torch.cat(crops).clamp(0, 1) * 255).round() / 255


def round_up(value: float) -> int:
    """The smallest whole number that is not below the value: round_up(2.1) is 3."""
    return -int(-value // 1)


def _mixup(images: Tensor, image_ids: Sequence[str], round: int, seed: int) -> Tensor:
    """a x + (1 - a) y, with y another image of the block and a >= 1/2 from Beta(.8, .8).

    The label stays that of x, the image with the larger weight.
    """
    if len(images) < 2:
        raise UserError(
            "client.augment: mixup needs another image in the block, but this one holds no other. "
            "Give more images, or choose another augmentation."
        )
    mixed = []
    for image, image_id in zip(images, image_ids, strict=True):
        others = [place for place, name in enumerate(image_ids) if name != image_id]
        partner = min(
            others, key=lambda place: derive_seed("mixup", seed, image_id, image_ids[place], round)
        )
        drawn = _rng("mixup", image_id, round, seed).betavariate(MIXUP_ALPHA, MIXUP_ALPHA)
        share = max(drawn, 1 - drawn)
        mixed.append(share * image + (1 - share) * images[partner])
    return torch.stack(mixed)


Augmentation = Callable[[Tensor, Sequence[str], int, int], Tensor]
"""From (images, image ids, round, seed) to the changed images."""
AUGMENTATIONS: Mapping[str, Augmentation] = {
    "none": _none,
    "flip": _flip,
    "crop": _crop,
    "mixup": _mixup,
}
