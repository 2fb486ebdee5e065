"""Patches between the model's normalised space and [0, 1]."""

from __future__ import annotations

from torch import Tensor, tensor

from mjp_privacy.interfaces import Pixels


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
