"""Controls: floors show what a score is worth, a ceiling shows what attacks can reach.

Unlike attacks, controls may look at the truth, so they are never a result. A floor reads no
gradient: an attack that scores no better has learnt nothing from the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.equations.patch_system import pseudo_inverse
from mjp_privacy.core.schema import height_width
from mjp_privacy.interfaces import AttackerView, ClientInput, Reconstruction
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_images, to_patches
from mjp_privacy.models.zoo import IMAGENET_MEAN


@dataclass(frozen=True)
class Grey:
    """Every pixel 0.5."""

    name: ClassVar[str] = "grey"
    role: ClassVar[Literal["floor", "ceiling"]] = "floor"

    def run(self, view: AttackerView, plain: Tensor, inputs: ClientInput) -> Reconstruction:
        """Images of 0.5 in the shape of the true ones."""
        return Reconstruction(torch.full_like(plain, 0.5))


@dataclass(frozen=True)
class MeanImage:
    """The mean of public photographs (`mean_image`), the same for every image."""

    name: ClassVar[str] = "mean_image"
    role: ClassVar[Literal["floor", "ceiling"]] = "floor"

    def run(self, view: AttackerView, plain: Tensor, inputs: ClientInput) -> Reconstruction:
        """The same mean colour for every image."""
        return Reconstruction(mean_image(view).to(plain).expand_as(plain).clone())


@dataclass(frozen=True)
class OtherImage:
    """The next image of the block (after the last, the first): a photograph, but the wrong one."""

    name: ClassVar[str] = "other_image"
    role: ClassVar[Literal["floor", "ceiling"]] = "floor"

    def run(self, view: AttackerView, plain: Tensor, inputs: ClientInput) -> Reconstruction:
        """The true images, shifted by one place; a block of one image has no other."""
        if len(plain) == 1:
            return Reconstruction(None, inapplicable={0: "the block holds no other image"})
        return Reconstruction(plain.roll(-1, dims=0))


@dataclass(frozen=True)
class OracleInverse:
    """The wanted image, embedded patch by patch and inverted by minimum norm: the best that an
    attack without a prior can reach."""

    name: ClassVar[str] = "oracle_inverse"
    role: ClassVar[Literal["floor", "ceiling"]] = "ceiling"

    def run(self, view: AttackerView, plain: Tensor, inputs: ClientInput) -> Reconstruction:
        """The images that are scored against, through the patch embedding and back."""
        wanted = inputs.images if view.against == "input" else plain
        assert isinstance(view.model, LoadedModel)
        device = view.model.like.device
        return Reconstruction(oracle_inverse(view.model, wanted.to(device)).cpu())


def oracle_inverse(model: LoadedModel, images: Tensor) -> Tensor:
    """The rank ceiling: every patch embedded and inverted, without its position.

    Images (m, C, H, W) in [0, 1] -> W^+ (W x), in [0, 1], float64. An attack that inverts the
    embedding by minimum norm gets no closer to the images, whatever the gradient holds; one that
    uses a prior may.
    """
    weight = model.patch_embed.proj.weight.detach().double().flatten(1)
    patches = to_patches(model.normalize(images.to(weight)), model.patch_size)
    projected = (patches @ weight.mT) @ pseudo_inverse(weight).mT
    restored = to_images(projected, model.grid, model.patch_size)
    return model.denormalize(restored).clamp(0, 1)


def mean_image(view: AttackerView) -> Tensor:
    """The mean colour of ImageNet's training images, as published, at every pixel, (C, H, W) in
    [0, 1]."""
    colour = torch.tensor(IMAGENET_MEAN)
    colour = colour if len(view.pixels.mean) == len(colour) else colour.mean().view(1)
    return colour.view(-1, 1, 1).expand(-1, *height_width(view.pixels.size))
