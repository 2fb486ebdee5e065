"""From patches in the model's normalised space to pictures in [0, 1].

Patches between the model's normalised space and [0, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor, tensor

from mjp_privacy.interfaces import AttackerView, Pixels
from mjp_privacy.models.jigsaw import to_images


def to_unit_range(view: AttackerView, images: Tensor) -> Tensor:
    """Images in the model's normalised space (..., C, H, W) -> clipped to [0, 1]."""
    mean = torch.tensor(view.pixels.mean).to(images).view(-1, 1, 1)
    std = torch.tensor(view.pixels.std).to(images).view(-1, 1, 1)
    return (images * std + mean).clamp(0, 1)


def pictures(view: AttackerView, patches: Tensor) -> Tensor:
    """Normalised patches (n, N, p) of n client steps -> images (m, C, H, W) in [0, 1].

    An attack that solves for one picture per client step gives it for each image of the step.
    """
    return pictures_of(view, patches).repeat_interleave(view.updates[0].batch, 0)


def pictures_of(view: AttackerView, patches: Tensor) -> Tensor:
    """Normalised patches (m, N, p) of m pictures -> images (m, C, H, W) in [0, 1]."""
    return to_unit_range(view, to_images(patches, view.model.patch_size, len(view.pixels.mean)))


def per_image(view: AttackerView, values: Tensor) -> Tensor:
    """One value or row per client step -> one per image, (n, ...) -> (m, ...)."""
    return values.repeat_interleave(view.updates[0].batch, 0)


# patches in [0, 1] --------------------------------------------------------------------------------


def in_levels(patches: Tensor, pixels: Pixels, patch_size: int) -> Tensor:
    """Normalised patches (N, p) in [0, 1]."""
    scale, zero = normalisation(pixels, patch_size, patches)
    return patches * scale + zero


def normalised(levels: Tensor, pixels: Pixels, patch_size: int) -> Tensor:
    """Patches (N, p) in [0, 1] as the model sees them."""
    scale, zero = normalisation(pixels, patch_size, levels)
    return (levels - zero) / scale


def normalisation(pixels: Pixels, patch_size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(p,) std and mean of each pixel of a patch."""
    area = patch_size**2
    std, mean = (
        tensor(values, dtype=like.dtype, device=like.device) for values in (pixels.std, pixels.mean)
    )
    return std.repeat_interleave(area), mean.repeat_interleave(area)
