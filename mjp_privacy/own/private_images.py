"""The private images that a user gives to score against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.own.tensors import FLOATS, as_tensor


def private_images(images: Any, count: int, size: int) -> Tensor:
    """(m, 3, S, S) float64 in [0, 1] from a tensor or array, one picture or several."""
    tensor = as_tensor(images)
    if tensor is None or tensor.dtype not in (*FLOATS, torch.uint8):
        kind = type(images).__name__ if tensor is None else f"one of {tensor.dtype}"
        raise UserError(
            "images: expected a tensor or array (B, 3, S, S) with values in [0, 1], got "
            f"{kind}. torchvision.transforms.functional.to_tensor(picture) makes one of a picture."
        )
    pixels = tensor.double()
    if tensor.dtype == torch.uint8:
        pixels = pixels / 255
    if pixels.ndim == 3:
        pixels = pixels.unsqueeze(0)
    expected = (count, 3, size, size)
    if tuple(pixels.shape) != expected:
        raise UserError(
            f"images: expected the shape {expected}, as many as the step had, got "
            f"{tuple(pixels.shape)}. Give the pixels as the client fed them: cropped and resized, "
            "not normalised."
        )
    low, high = (float(bound) for bound in pixels.aminmax())
    if not (low >= -1e-6 and high <= 1 + 1e-6):
        raise UserError(
            f"images: expected values in [0, 1], got values from {low:.3g} to {high:.3g}. Give "
            "them before normalisation (or undo it: images * std + mean)."
        )
    return pixels.clamp(0, 1)
