"""What stands beside the scores of a cell: bounds, the puzzle, the regions, the residual.

Each is {name: (m,)}, NaN where it says nothing of an image; NaN is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.controls import mean_image, oracle_inverse
from mjp_privacy.experiment.config import Cell
from mjp_privacy.experiment.residual import Mode, gradient_residual
from mjp_privacy.interfaces import AttackerView, ClientInput, Reconstruction
from mjp_privacy.metrics.jigsaw import (
    direct_accuracy,
    matched_patches,
    neighbour_accuracy,
    rearranged,
)
from mjp_privacy.metrics.pixel import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import shuffle_patches, to_patches


@dataclass(frozen=True)
class Scene:
    """A block as its client, its attacker and its scorer have it."""

    photographs: Tensor  # (m, C, S, S) in [0, 1], as they were read
    plain: Tensor  # (m, C, S, S), as they entered round 0: augmented, not shuffled
    inputs: ClientInput  # of round 0
    target: Tensor  # (m, C, S, S), what is scored against
    models: Sequence[LoadedModel]  # that the client trained, one an upload
    view: AttackerView

    def tensors(self) -> dict[str, Tensor]:
        """What is stored beside the reconstruction."""
        fed = self.inputs
        stored = {"target": self.target, "plain": self.plain, "input": fed.images}
        if fed.mask is not None and fed.permutation is not None:
            stored |= {"mask": fed.mask, "permutation": fed.permutation}
        return stored


def diagnose(
    cell: Cell, scene: Scene, found: Reconstruction, images: Tensor, oracle: Tensor
) -> dict[str, Tensor]:
    """All that stands beside a score but the attack's own. images (m, C, S, S): as stored; oracle:
    what `oracle` gave."""
    inputs, target, view = scene.inputs, scene.target, scene.view
    return {
        **bounds(cell, inputs, target, oracle),
        **puzzle(inputs),
        **mask_agreement(found.mask, inputs),
        **regions(view, images, inputs, target),
        **jigsaw(found, images, inputs, scene.plain, view),
        **original(cell, scene, images),
        **residual(view, found, images, scene.models, cell.client.mode),
    }


def oracle(model: LoadedModel, inputs: ClientInput) -> Tensor:
    """The rank ceiling's images (m, C, S, S): what the client fed through W and its inverse."""
    return oracle_inverse(model, inputs.images.to(model.cls_token.device)).cpu()


def bounds(cell: Cell, inputs: ClientInput, target: Tensor, oracle: Tensor) -> dict[str, Tensor]:
    """Ceiling and floor.

    The ceiling is the oracle inverse against the image the client fed. In setting c that is out of
    an attack's reach until it puts the patches back; the same oracle left in the order it was fed
    stands beside it.
    """
    found = {
        "ceiling_psnr": psnr(oracle, inputs.images),
        "grey_psnr": psnr(torch.full_like(target, 0.5), target),
    }
    return found | ({"oracle_in_place_psnr": psnr(oracle, target)} if cell.setting == "c" else {})


def puzzle(inputs: ClientInput) -> dict[str, Tensor]:
    """The realised mask and order; nothing where nothing is ever shuffled."""
    if inputs.mask is None or inputs.permutation is None:
        return {}
    count = inputs.mask.sum(-1)
    unmoved = torch.arange(inputs.permutation.shape[-1])
    return {
        "shuffled_patches": count,
        "moved_patches": (inputs.permutation != unmoved).sum(-1),
        "empty_mask": (count == 0).double(),
    }


def mask_agreement(named: Tensor | None, inputs: ClientInput) -> dict[str, Tensor]:
    """Precision and recall of the positions that the attack named as shuffled.

    Both are 1 where nothing was shuffled and nothing was named.
    """
    if named is None:
        return {}
    named = named.cpu()
    true = torch.zeros_like(named) if inputs.mask is None else inputs.mask
    hits = (named & true).sum(-1).double()
    nothing = ~(named | true).any(-1)
    return {
        "mask_precision": torch.where(nothing, 1.0, hits / named.sum(-1)),
        "mask_recall": torch.where(nothing, 1.0, hits / true.sum(-1)),
    }


def regions(
    view: AttackerView, images: Tensor, inputs: ClientInput, target: Tensor
) -> dict[str, Tensor]:
    """PSNR over the patches that were not shuffled and over those that were, and the mean image's
    over the former; of images that have some of both."""
    if inputs.mask is None:
        return {}
    size = view.model.patch_size
    visible = ~inputs.mask
    mean = mean_image(view).to(target).expand_as(target)
    found = {
        "visible_psnr": _region_psnr(images, target, visible, size),
        "masked_psnr": _region_psnr(images, target, inputs.mask, size),
        "mean_visible_psnr": _region_psnr(mean, target, visible, size),
    }
    both = visible.any(-1) & inputs.mask.any(-1)
    return {name: values.where(both, torch.nan) for name, values in found.items()}


def _region_psnr(images: Tensor, target: Tensor, region: Tensor, patch_size: int) -> Tensor:
    """(m,) dB over the patches where `region` (m, N) is true."""
    error = to_patches(images.double() - target.double(), patch_size).square().mean(-1)
    return -10 * ((error * region).sum(-1) / region.sum(-1)).log10()


def jigsaw(
    found: Reconstruction, images: Tensor, inputs: ClientInput, plain: Tensor, view: AttackerView
) -> dict[str, Tensor]:
    """Where the masked patches went, of attacks that put them somewhere; the best order of the
    same patches stands beside as `oracle_permutation_psnr`, against the plain image."""
    if found.permutation is None or inputs.mask is None or inputs.permutation is None:
        return {}
    size = view.model.patch_size
    if view.against == "input":  # patches stand as they were fed: take them to where it says
        images = shuffle_patches(images, found.permutation.cpu().argsort(-1), size)
    images = images.nan_to_num(0.5)
    placed = matched_patches(images, plain, inputs.mask, size)
    best = psnr(rearranged(images, placed, size), plain)
    return {
        "jigsaw_direct": direct_accuracy(placed, inputs.mask),
        "jigsaw_neighbour": neighbour_accuracy(placed, inputs.mask),
        "oracle_permutation_psnr": best.where(inputs.mask.any(-1), torch.nan),
    }


def original(cell: Cell, scene: Scene, images: Tensor) -> dict[str, Tensor]:
    """Against the photograph itself, where the client alters it before the shuffle."""
    if cell.client.augment == "none":
        return {}
    return {"original_psnr": psnr(images, scene.photographs)}


def residual(
    view: AttackerView,
    found: Reconstruction,
    images: Tensor,
    models: Sequence[LoadedModel],
    mode: Mode,
) -> dict[str, Tensor]:
    """How far the gradient of the reconstruction is from the upload; no truth enters it."""
    measured = gradient_residual(view, images, found.mask, models, mode)
    return {} if measured is None else {"gradient_residual": measured}
