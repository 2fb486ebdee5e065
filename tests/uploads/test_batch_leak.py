"""What is said and drawn of a user's batches: what is certain, and no check that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from mjp_privacy import attack_gradients
from mjp_privacy.uploads.attacking import batch_notes
from mjp_privacy.uploads.leak import Leak
from tests.helpers.models import planted_model, tiny_model
from tests.helpers.planted import planted_images
from tests.uploads.test_attack_gradients import gradient_of

SIDE, LARGER = 8, 32
SHARED = {"img_size": LARGER, "patch_size": 8, "embed_dim": 80, "depth": 1, "num_heads": 4}


@pytest.fixture(scope="module")
def one_upload() -> Leak:
    """A batch of two whose pictures `layer_span` finds; the labels are given in another order."""
    model = planted_model(img_size=SIDE, depth=3)
    sent = gradient_of(model, planted_images(2, SIDE), torch.tensor([3, 5]))
    chosen = {"patch_gradient": {}, "layer_span": {"prior": "stationary"}}
    return attack_gradients(model, sent, labels=[5, 3], attacks=chosen)


@pytest.fixture(scope="module")
def two_uploads() -> tuple[Leak, Leak]:
    """Two batches that share the picture 2; without and with the originals."""
    model = tiny_model({**SHARED, "num_classes": 10, "mean": 0.5, "std": 0.25}, "conditioned")
    images = planted_images(6, LARGER)
    sent = [step(model, images, numbers) for numbers in ((0, 1, 2), (3, 4, 2))]
    chosen = {"shared_picture": {"prior": "stationary"}, "patch_gradient": {}}
    leaks = (
        attack_gradients(model, sent, batch=3, attacks=chosen, images=originals)
        for originals in (None, images)
    )
    return next(leaks), next(leaks)


def step(model: torch.nn.Module, images: Tensor, numbers: tuple[int, ...]) -> dict[str, Tensor]:
    chosen = list(numbers)
    return gradient_of(model, images[chosen], torch.tensor(chosen))  # type: ignore[arg-type]


def titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


def test_found_pictures_are_the_verdict_and_labels_are_no_doubt(one_upload: Leak) -> None:
    assert one_upload.best.attack == "layer_span"
    assert one_upload.best.residuals is None
    assert one_upload.best.is_certain
    assert "2 of 2" in one_upload.verdict
    assert "nan" not in str(one_upload)


def test_what_the_attacks_on_a_batch_do_is_said_where_they_ran(one_upload: Leak) -> None:
    (note,) = one_upload.notes
    assert "layer_span" in note
    assert "batch_span" not in note
    assert "batch_span" in batch_notes(4, 2, ["batch_span"])[0]
    assert batch_notes(4, 1, ["inverting_gradients"]) == batch_notes(1, 1, ["batch_span"]) == ()


def test_where_nothing_is_verified_the_best_is_made_for_batches() -> None:
    model = tiny_model({**SHARED, "num_classes": 10, "mean": 0.5, "std": 0.25}, "conditioned")
    sent = step(model, planted_images(6, LARGER), (0, 1))
    chosen = {"patch_gradient": {}, "batch_span": {"prior": "stationary"}}
    leak = attack_gradients(model, sent, batch=2, attacks=chosen)
    assert [made.attack for made in leak.ranked] == ["batch_span", "patch_gradient"]


def test_attacks_with_different_numbers_of_pictures_are_drawn(
    two_uploads: tuple[Leak, Leak], tmp_path: Path
) -> None:
    leak, _ = two_uploads
    figure = leak.show(tmp_path / "leak.png")
    assert (tmp_path / "leak.png").stat().st_size > 5000
    first, second, *_ = (title for title in titles(figure) if "shared_picture" in title)
    assert "certain" in first  # certain ones first, wherever their places are
    assert "certain" in second
    assert sum("patch_gradient" in title for title in titles(figure)) == 3
    said = figure.get_suptitle()
    assert "Drawn: 4 of 6 pictures of shared_picture." in said


def test_beside_an_original_stands_the_picture_that_was_scored(
    two_uploads: tuple[Leak, Leak],
) -> None:
    _, leak = two_uploads
    figure = leak.show()
    assert ["certain" in title for title in titles(figure)[1::3]] == [False, False, True, False]
    drawn = figure.axes[2 * 3 + 1].images[0].get_array()  # picture 2, in the best attack's column
    original = figure.axes[2 * 3].images[0].get_array()
    assert drawn is not None
    assert original is not None
    assert abs(torch.as_tensor(drawn) - torch.as_tensor(original)).max() < 1e-3
