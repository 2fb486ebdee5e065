"""What stands beside the scores: masks found, regions, patches put back, the residual."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.controls import mean_image
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.experiment import diagnostics
from mjp_privacy.experiment.diagnostics import RESIDUAL_OVER, gradient_fit
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.metrics.matching import (
    matched_patches,
    rearranged,
)
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models.jigsaw import draw_masks, shuffle_patches, to_images, to_patches
from tests.helpers.models import PATCH, some_images, some_labels, some_masks, tiny
from tests.helpers.own_attacks import mjp
from tests.helpers.runs import attack, one_cell, outcome, rows, values, written

NAMES = ["pos_embed", RESIDUAL_OVER]


def puzzle(count: int = 3, gamma: float = 0.5) -> tuple[Tensor, ClientInput]:
    plain, ids = some_images(count), [f"image {i}" for i in range(count)]
    mask, permutation = draw_masks(ids, grid=4, gamma=gamma, round=0, seed=1)
    fed = shuffle_patches(plain, permutation, PATCH)
    return plain, ClientInput(fed, some_labels(count), ids, mask, permutation)


def view_of(inputs: ClientInput, against: str = "plain", **client: object) -> AttackerView:
    model = tiny(unknown_embedding=True)
    config = ClientConfig(**client)  # type: ignore[arg-type]
    update = FedSGDClient(model, config).update(inputs, names=NAMES)
    pixels = Pixels(32, model.card.mean, model.card.std)
    return AttackerView(model, [update], pixels, inputs.labels, against)  # type: ignore[arg-type]


def test_mask_agreement() -> None:
    true = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    named = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    images = torch.zeros(5, 3, 2, 2)
    inputs = ClientInput(images, torch.zeros(5), list("abcde"), true.bool(), torch.zeros(5, 4))
    found = diagnostics.mask_agreement(named.bool(), inputs)
    expected = {
        "mask_precision": [1, 1 / 3, 1, 0, math.nan],
        "mask_recall": [1, 0.5, 1, math.nan, 0],
    }
    for name, wanted in expected.items():
        assert found[name].tolist() == pytest.approx(wanted, nan_ok=True)
    assert diagnostics.mask_agreement(None, inputs) == {}
    unshuffled = ClientInput(images, torch.zeros(5), list("abcde"))
    found = diagnostics.mask_agreement(torch.zeros(5, 4).bool(), unshuffled)
    assert found["mask_precision"].tolist() == [1] * 5


def test_regions_are_scored_apart() -> None:
    plain, inputs = puzzle()
    assert inputs.mask is not None
    view = view_of(inputs)
    wrong = to_patches(plain, PATCH).clone()
    wrong[inputs.mask] += 0.1
    wrong[~inputs.mask] -= 0.01
    found = diagnostics.regions(view, to_images(wrong, PATCH), inputs, plain)
    assert found["masked_psnr"].tolist() == pytest.approx([20] * 3)
    assert found["visible_psnr"].tolist() == pytest.approx([40] * 3)
    mean = mean_image(view).to(plain).expand_as(plain)
    error = to_patches(mean - plain, PATCH)[0][~inputs.mask[0]].square().mean()
    assert found["mean_visible_psnr"][0].item() == pytest.approx(-10 * math.log10(error))
    plain, empty = puzzle(gamma=0.0)
    found = diagnostics.regions(view, plain, empty, plain)
    assert all(values.isnan().all() for values in found.values())
    unshuffled = ClientInput(plain, some_labels(3), list("abc"))
    assert diagnostics.regions(view, plain, unshuffled, plain) == {}


# patches put back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("against", ["input", "plain"])
def test_an_attack_that_knows_the_order_is_all_right(against: str) -> None:
    plain, inputs = puzzle()
    view = view_of(inputs, against)
    images = inputs.images if against == "input" else plain
    known = Reconstruction(images, permutation=inputs.permutation)
    found = diagnostics.jigsaw(known, images, inputs, plain, view)
    assert found["jigsaw_direct"].tolist() == [1] * 3
    assert found["jigsaw_neighbour"].tolist() == [1] * 3
    left = Reconstruction(inputs.images, permutation=torch.arange(16).repeat(3, 1))
    found = diagnostics.jigsaw(left, inputs.images, inputs, plain, view)
    assert (found["jigsaw_direct"] < 1).all()
    assert (found["oracle_permutation_psnr"] > 200).all()
    assert diagnostics.jigsaw(Reconstruction(images), images, inputs, plain, view) == {}


def test_the_oracle_order_is_the_best_of_the_same_patches() -> None:
    plain, inputs = puzzle(1)
    assert inputs.mask is not None
    noisy = (inputs.images + 0.02).clamp(0, 1)
    best = rearranged(noisy, matched_patches(noisy, plain, inputs.mask, PATCH), PATCH)
    assert psnr(best, plain).item() == pytest.approx(34, abs=0.5)
    assert psnr(noisy, plain) < 20


# the residual -------------------------------------------------------------------------------------


def test_the_residual_is_zero_for_the_truth_and_large_for_another_image() -> None:
    _, inputs = puzzle(4)
    view = view_of(inputs)
    right = gradient_fit(view, inputs.images, inputs.mask, [view.model])
    other = gradient_fit(view, inputs.images.flip(0), inputs.mask, [view.model])
    assert right is not None
    assert other is not None
    assert right.residual.shape == (4,)
    assert (right.residual < 1e-9).all()
    assert (other.residual > 0.1).all()


def test_without_an_estimate_the_zero_rows_are_the_mask_and_the_order_does_not_matter() -> None:
    plain, inputs = puzzle()
    view = view_of(inputs)
    for images in (inputs.images, plain):
        found = gradient_fit(view, images, None, [view.model])
        assert found is not None
        assert (found.residual < 1e-6).all()
    wrong = gradient_fit(view, inputs.images, some_masks(3), [view.model])
    assert wrong is not None
    assert (wrong.residual > 1e-3).all()


def test_a_batch_has_no_residual_because_its_order_means_nothing() -> None:
    _, inputs = puzzle(4)
    view = view_of(inputs, batch=2)
    for images in (inputs.images, inputs.images.flip(0)):
        assert gradient_fit(view, images, inputs.mask, [view.model]) is None


def test_no_residual_without_the_gradient_or_the_labels() -> None:
    _, inputs = puzzle()
    view = view_of(inputs)
    blind = replace(view, labels=None)
    grads = {"pos_embed": view.updates[0].grads["pos_embed"]}
    bare = replace(view, updates=[replace(view.updates[0], grads=grads)])
    for less in (blind, bare):
        assert gradient_fit(less, inputs.images, None, [view.model]) is None


SPAN, LOCAL = {"name": "masked_span"}, {"name": "patch_gradient"}
APRIL, GREY = {"name": "april"}, {"name": "grey"}


@pytest.mark.parametrize(
    ("attacks", "asked", "having"),
    [
        ([LOCAL], [], set()),  # nobody competes with it
        ([LOCAL, APRIL, GREY], [], set()),  # APRIL's client has another block 0
        ([LOCAL, SPAN, APRIL, GREY], [], {"patch_gradient", "masked_span"}),
        ([LOCAL], ["residual"], {"patch_gradient"}),
        ([APRIL, GREY], ["residual"], {"april"}),
    ],
)
def test_the_residual_is_computed_where_it_decides_or_is_asked_for(
    three: Path, tmp_path: Path, attacks: list[Any], asked: list[str], having: set[str]
) -> None:
    config = one_cell(attacks=attacks, diagnostics=asked, dtypes=["float64"])
    attack(three, tmp_path, config, limit=1)
    found = rows(tmp_path)
    assert set(found[found["metric"] == "gradient_residual"]["attack"]) == having


# rows of special cases ----------------------------------------------------------------------------


def test_an_attack_that_names_masks_only_is_scored_by_them(three: Path, tmp_path: Path) -> None:
    config = mjp("c", {"name": "mask_locator"})
    assert attack(three, tmp_path, config).exit_code == 0
    assert {status for status, _ in outcome(tmp_path).values()} == {"unscored"}
    told = values(tmp_path)
    for name in ("mask_precision", "mask_recall"):
        assert (told.xs(name, level="metric") == 1).all()
    before = written(tmp_path)
    attack(three, tmp_path, config)  # it is finished
    assert written(tmp_path) == before
