"""From patches in the model's normalised space to pictures in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor

from mjp_privacy.interfaces import AttackerView
from mjp_privacy.models.jigsaw import to_images


def to_unit_range(view: AttackerView, x: Tensor) -> Tensor:
    """Normalised images -> [0, 1], clipped."""
    mean = torch.tensor(view.pixels.mean).to(x).view(-1, 1, 1)
    std = torch.tensor(view.pixels.std).to(x).view(-1, 1, 1)
    return (x * std + mean).clamp(0, 1)


def pictures(view: AttackerView, patches: Tensor) -> Tensor:
    """Normalised patches (n, N, p) of n client steps -> images (m, C, H, W) in [0, 1].

    An attack that solves for one picture a step gives it for each of the step's images.
    """
    images = to_images(patches, view.model.patch_size, len(view.pixels.mean))
    return to_unit_range(view, images).repeat_interleave(view.updates[0].batch, 0)


def per_image(view: AttackerView, values: Tensor) -> Tensor:
    """One value or row a step -> one an image."""
    return values.repeat_interleave(view.updates[0].batch, 0)
