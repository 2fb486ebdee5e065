"""Uploads to be read with care: nothing was shuffled in them, or an error was not declared."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.equations import TABLE
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.diagnostics import shows_no_mask, unshuffled_uploads
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.uploads.folder import UploadFolder
from tests.helpers import uploads
from tests.helpers.federations import MJP, run
from tests.helpers.runs import MJP as TINY_MJP
from tests.helpers.runs import rows
from tests.helpers.uploads import check_uploads

RECIPE: dict[str, Any] = {
    "model": MJP,
    "gamma": 0.5,
    "client": {"batch": 1, "plain_share": 0.5},
    "record": {"rounds": [1], "images": 4, "probes": [{"uploads": 3}]},
}


STATIONARY = {"prior": "stationary"}


ATTACKS = [
    {"name": "grey"},
    {"name": "masked_span", "options": STATIONARY},
    {"name": "mask_locator"},
    {"name": "multi_round", "options": {"uploads": 3, **STATIONARY}},
]


@pytest.fixture(scope="module")
def half_plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three uploads each of four images, about half of them unshuffled."""
    return run(tmp_path_factory.mktemp("federation"), **RECIPE) / "uploads"


def empty_masks(folder: Path, uploads: int) -> dict[str, float]:
    """By image, how many of its first uploads had an empty mask, as the truth says."""
    counts: dict[str, float] = {}
    series: dict[str, int] = {}
    for upload in sorted(UploadFolder(folder).entries(), key=lambda entry: entry.header.round):
        truth = upload.truth()
        assert truth is not None
        assert truth.mask is not None
        (image,) = truth.image_ids
        series[image] = series.get(image, 0) + 1
        empty = not truth.mask.any() and series[image] <= uploads
        counts[image] = counts.get(image, 0) + empty
    return counts


def marked(folder: Path, out: Path, *attacks: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many unshuffled uploads are told of each image, by attack."""
    experiment = load_experiment({"name": "attacks", "attacks": attacks or ATTACKS})
    attack_uploads(experiment, folder, out, device="cpu")
    found = rows(out)
    found = found[found["metric"] == "unshuffled_uploads"]
    parts = found.groupby("attack")
    return {str(n): dict(zip(p["image_id"], p["value"], strict=True)) for n, p in parts}


# unshuffled ---------------------------------------------------------------------------------------


def test_rows_count_the_uploads_that_masked_nothing(half_plain: Path, tmp_path: Path) -> None:
    found = marked(half_plain, tmp_path)
    one, three = empty_masks(half_plain, 1), empty_masks(half_plain, 3)
    assert 0 < sum(one.values()) < 4
    assert sum(one.values()) < sum(three.values()) < 12
    assert found == {"masked_span": one, "mask_locator": one, "multi_round": three}
    text, usable = check_uploads(half_plain)
    assert usable
    assert f"{int(sum(three.values()))} of 12 uploads are unshuffled" in text


def test_no_private_image_is_needed(half_plain: Path, tmp_path: Path) -> None:
    folder = uploads.copied(half_plain, tmp_path / "uploads")
    shutil.rmtree(folder / "truth")
    found = marked(folder, tmp_path / "run")
    assert {*rows(tmp_path / "run")["status"]} == {"ok", "unscored", "unsupported"}
    expected = sorted(empty_masks(half_plain, 1).values())
    assert sorted(found["masked_span"].values()) == expected
    assert sorted(found["mask_locator"].values()) == expected
    assert "uploads are unshuffled" in check_uploads(folder)[0]


def test_one_plain_step_of_weights_shows_it(tmp_path: Path) -> None:
    """Also with weight decay, for which the weights of each upload's own round are needed."""
    client = RECIPE["client"] | {"lr": 0.1, "weight_decay": 0.1, "upload": "weight_difference"}
    changes = {"client": client, "server": {"optimizer": "sgd", "lr": 1.0}}
    folder = run(tmp_path, **{**RECIPE, **changes}) / "uploads"
    number = int(sum(empty_masks(folder, 3).values()))
    assert number
    assert f"{number} of 12 uploads are unshuffled" in check_uploads(folder)[0]


IMAGES = 4


MASKED = [True, False, True, False]  # images 0 and 2 have some patches masked


EXPECTED = [0.0, 1.0, 0.0, 1.0]


DIFFERENCE = {"upload": "weight_difference", "lr": 0.1}


@pytest.fixture
def model() -> LoadedModel:
    return load_model(**TINY_MJP)


def shown(model: LoadedModel, **client: Any) -> list[float] | None:
    """What the uploads of this client show: 1 nothing masked, 0 something, None not shown."""
    generator = torch.Generator().manual_seed(5)
    images = torch.rand(IMAGES, 3, 32, 32, generator=generator)
    mask = torch.zeros(IMAGES, 16, dtype=torch.bool)
    mask[MASKED, :5] = True
    names = [f"image {place}" for place in range(IMAGES)]
    inputs = ClientInput(images, torch.arange(IMAGES), names, mask)
    update = make_upload(model, [inputs], ClientConfig(**client), names=[TABLE])
    view = AttackerView(model, [update], Pixels(32, model.card.mean, model.card.std))
    found = shows_no_mask(view, update)
    counted = unshuffled_uploads(view, 0.5)
    if found is None:
        assert counted == {}
        return None
    torch.testing.assert_close(counted["unshuffled_uploads"], found, equal_nan=True)
    return None if found.isnan().all() else found.tolist()


@pytest.mark.parametrize(
    "client",
    [
        {},
        DIFFERENCE,
        {**DIFFERENCE, "optimizer": "adamw", "lr": 1e-3},
        {"defenses": ["dp_sgd 0 clip 0.1"]},  # every gradient as a whole becomes smaller
        {"defenses": ["gaussian_noise 0"]},
    ],
    ids=str,
)
def test_uploads_without_errors_show_what_was_masked(
    model: LoadedModel, client: dict[str, Any]
) -> None:
    assert shown(model, **client) == EXPECTED


@pytest.mark.parametrize(
    "client",
    [
        # zero rows are filled: every upload looked as if nothing had been masked
        {**DIFFERENCE, "optimizer": "adamw", "lr": 1e-3, "defenses": ["dp_sgd 0.5"]},
        {"defenses": ["gaussian_noise 0.1", "sign"]},
        {"defenses": ["gaussian_noise 0.1"]},
        {"defenses": ["dp_sgd 1"]},
        {"position_noise": 0.1},
        # rows are emptied: every upload looked as if something had been masked
        {"defenses": ["prune 0.01"]},
        {"defenses": ["top_k 0.001"]},
        {"defenses": ["percentile_privacy 99"]},
        {"defenses": ["int8"]},
        {**DIFFERENCE, "lr": 1e-4, "defenses": ["prune 0.5"]},
        {**DIFFERENCE, "lr": 1e-6},
    ],
    ids=str,
)
def test_errors_hide_what_was_masked(model: LoadedModel, client: dict[str, Any]) -> None:
    assert shown(model, **client) is None
