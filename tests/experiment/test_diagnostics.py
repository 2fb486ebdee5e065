"""What stands beside the scores: patches put back, and the residual. Masks found and regions are
among the golden rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.experiment import diagnostics
from mjp_privacy.experiment.diagnostics import RESIDUAL_OVER, gradient_fit
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.metrics.matching import matched_patches, rearranged
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models.jigsaw import Grid, draw_masks, shuffle_patches
from tests.helpers.models import PATCH, some_images, some_labels, some_masks, tiny


def puzzle(count: int = 3, gamma: float = 0.5) -> tuple[Tensor, ClientInput]:
    plain, ids = some_images(count), [f"image {i}" for i in range(count)]
    mask, permutation = draw_masks(ids, grid=Grid(4, 4), gamma=gamma, round=0, seed=1)
    fed = shuffle_patches(plain, permutation, PATCH)
    return plain, ClientInput(fed, some_labels(count), ids, mask, permutation)


def view_of(inputs: ClientInput, against: str = "plain", **client: object) -> AttackerView:
    model = tiny(unknown_embedding=True)
    config = ClientConfig(**client)  # type: ignore[arg-type]
    update = make_upload(model, [inputs], config, names=["pos_embed", RESIDUAL_OVER])
    pixels = Pixels(32, model.card.mean, model.card.std)
    return AttackerView(model, [update], pixels, inputs.labels, against)  # type: ignore[arg-type]


@pytest.mark.parametrize("against", ["input", "plain"])
def test_an_attack_that_knows_the_order_is_all_right(against: str) -> None:
    plain, inputs = puzzle()
    view, images = view_of(inputs, against), inputs.images if against == "input" else plain
    known = Reconstruction(images, permutation=inputs.permutation)
    found = diagnostics.jigsaw(known, images, inputs, plain, view)
    assert found["jigsaw_direct"].tolist() == found["jigsaw_neighbour"].tolist() == [1] * 3
    left = Reconstruction(inputs.images, permutation=torch.arange(16).repeat(3, 1))
    found = diagnostics.jigsaw(left, inputs.images, inputs, plain, view)
    assert (found["jigsaw_direct"] < 1).all()
    assert (found["oracle_permutation_psnr"] > 200).all()
    assert diagnostics.jigsaw(Reconstruction(images), images, inputs, plain, view) == {}
    assert inputs.mask is not None  # the oracle's order is the best of the same patches
    noisy = (inputs.images + 0.02).clamp(0, 1)
    best = rearranged(noisy, matched_patches(noisy, plain, inputs.mask, PATCH), PATCH)
    assert (psnr(best, plain) - 34).abs().max() < 0.7
    assert (psnr(noisy, plain) < 20).all()


def residual(view: AttackerView, images: Tensor, mask: Tensor | None) -> Tensor | None:
    fit = gradient_fit(view, images, mask, [view.model])
    return None if fit is None else fit.residual


def test_the_residual_is_zero_for_the_truth_and_large_for_anything_else() -> None:
    plain, inputs = puzzle(4)
    view = view_of(inputs)
    for images, mask, low, high in (
        (inputs.images, inputs.mask, 0, 1e-9),
        (inputs.images.flip(0), inputs.mask, 0.1, 99),
        (inputs.images, None, 0, 1e-6),  # the zero rows are the mask
        (plain, None, 0, 1e-6),  # and the order does not matter
        (inputs.images, some_masks(4), 1e-3, 99),
    ):
        found = residual(view, images, mask)
        assert found is not None
        assert found.shape == (4,)
        assert ((low <= found) & (found < high)).all()
    bare = replace(view.updates[0], grads={"pos_embed": view.updates[0].grads["pos_embed"]})
    for less in (
        view_of(inputs, batch=2),  # its order means nothing
        replace(view, labels=None),
        replace(view, updates=[bare]),
    ):
        assert residual(less, inputs.images, None) is None
