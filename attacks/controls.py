"""Controls. Unlike attacks they may look at the truth; they are never a result."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.linear_algebra import pseudo_inverse
from mjp_privacy.interfaces import AttackerView
from mjp_privacy.models import Victim
from mjp_privacy.models.jigsaw import to_images, to_patches

MEAN_COLOUR = (0.485, 0.456, 0.406)
"""The published channel means of ImageNet's training images: public, and nothing of a target's."""


def oracle_inverse(model: Victim, images: Tensor) -> Tensor:
    """The rank ceiling: the true embedding of every patch through the same inverse.

    Images (m, C, H, W) in [0, 1] as the client fed them -> W^+ (W x), in [0, 1], float64. An attack
    that inverts the embedding by minimum norm gets no closer to them, whatever the gradient holds;
    one that brings a prior may.
    """
    weight = model.patch_embed.proj.weight.detach().double().flatten(1)
    x = to_patches(model.normalize(images.to(weight)), model.patch_size)
    projected = (x @ weight.mT) @ pseudo_inverse(weight).mT
    restored = to_images(projected, model.patch_size, images.shape[-3])
    return model.denormalize(restored).clamp(0, 1)


def mean_image(view: AttackerView) -> Tensor:
    """(C, S, S) in [0, 1]: the mean colour of photographs, tiled; what is right on average."""
    return torch.tensor(MEAN_COLOUR).view(-1, 1, 1).expand(-1, view.pixels.size, view.pixels.size)


def psnr(images: Tensor, references: Tensor) -> Tensor:
    """(m,) dB at peak 1, float64; inf where identical. For diagnostics; scores are `metrics`'."""
    error = (images.double() - references.double()).square().flatten(1).mean(-1)
    return -10 * torch.log10(error)
