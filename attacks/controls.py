"""Controls: what a score is worth, and what an attack can reach.

Unlike attacks they may look at the truth; they are never a result. A floor reads no gradient at
all, so an attack that scores no better has learnt nothing from one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.equations.least_squares import pseudo_inverse
from mjp_privacy.interfaces import AttackerView, ClientInput, Reconstruction, Truth
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_images, to_patches

MEAN_COLOUR = (0.485, 0.456, 0.406)
"""The published channel means of ImageNet's training images: public, and nothing of a target's."""


@dataclass(frozen=True)
class Grey:
    """Every pixel 0.5."""

    name: ClassVar[str] = "grey"
    role: ClassVar[Literal["floor", "ceiling"]] = "floor"

    def run(
        self, view: AttackerView, truth: Truth, inputs: ClientInput, *, generator: torch.Generator
    ) -> Reconstruction:
        return Reconstruction(torch.full_like(truth.images, 0.5))


@dataclass(frozen=True)
class MeanImage:
    """The mean of public photographs (`mean_image`), the same for every image."""

    name: ClassVar[str] = "mean_image"
    role: ClassVar[Literal["floor", "ceiling"]] = "floor"

    def run(
        self, view: AttackerView, truth: Truth, inputs: ClientInput, *, generator: torch.Generator
    ) -> Reconstruction:
        return Reconstruction(mean_image(view).to(truth.images).expand_as(truth.images).clone())


@dataclass(frozen=True)
class OtherImage:
    """The next image of the block, the last one's being the first: a photograph, but not this."""

    name: ClassVar[str] = "other_image"
    role: ClassVar[Literal["floor", "ceiling"]] = "floor"

    def run(
        self, view: AttackerView, truth: Truth, inputs: ClientInput, *, generator: torch.Generator
    ) -> Reconstruction:
        if len(truth.images) == 1:
            return Reconstruction(None, inapplicable={0: "the block holds no other image"})
        return Reconstruction(truth.images.roll(-1, dims=0))


@dataclass(frozen=True)
class OracleInverse:
    """The true patch embeddings through the minimum-norm inverse, each patch in the place where
    the wanted image has it: what attacks without a prior can reach."""

    name: ClassVar[str] = "oracle_inverse"
    role: ClassVar[Literal["floor", "ceiling"]] = "ceiling"

    def run(
        self, view: AttackerView, truth: Truth, inputs: ClientInput, *, generator: torch.Generator
    ) -> Reconstruction:
        wanted = inputs.images if view.against == "input" else truth.images
        assert isinstance(view.model, LoadedModel)
        device = view.model.cls_token.device
        return Reconstruction(oracle_inverse(view.model, wanted.to(device)).cpu())


def oracle_inverse(model: LoadedModel, images: Tensor) -> Tensor:
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
