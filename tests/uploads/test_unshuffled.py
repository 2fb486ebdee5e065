"""Uploads of an MJP client in which nothing was shuffled: counted where they show it."""

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
from tests.helpers import uploads
from tests.helpers.federations import MJP, run
from tests.helpers.runs import MJP as TINY_MJP
from tests.helpers.runs import rows
from tests.helpers.uploads import check_uploads, load_uploads

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
    empty: dict[str, list[bool]] = {}
    for upload in sorted(load_uploads(folder), key=lambda entry: entry.header.round):
        truth = upload.truth()
        assert truth is not None
        assert truth.mask is not None
        empty.setdefault(truth.image_ids[0], []).append(not truth.mask.any())
    return {image: float(sum(masks[:uploads])) for image, masks in empty.items()}


def marked(folder: Path, out: Path) -> dict[str, dict[str, float]]:
    """How many unshuffled uploads are told of each image, by attack."""
    experiment = load_experiment({"name": "attacks", "attacks": ATTACKS})
    attack_uploads(experiment, folder, out, device="cpu")
    found = rows(out)
    parts = found[found["metric"] == "unshuffled_uploads"].groupby("attack")
    return {str(n): dict(zip(p["image_id"], p["value"], strict=True)) for n, p in parts}


def test_rows_and_check_count_the_uploads_that_masked_nothing(
    half_plain: Path, tmp_path: Path
) -> None:
    """No private image is needed for it."""
    one, three = empty_masks(half_plain, 1), empty_masks(half_plain, 3)
    assert 0 < sum(one.values()) < 4
    assert sum(one.values()) < sum(three.values()) < 12
    expected = {"masked_span": one, "mask_locator": one, "multi_round": three}
    assert marked(half_plain, tmp_path / "scored") == expected
    folder = uploads.copied(half_plain, tmp_path / "uploads")
    shutil.rmtree(folder / "truth")
    found = marked(folder, tmp_path / "run")
    assert {*rows(tmp_path / "run")["status"]} == {"ok", "unscored", "unsupported"}
    for name, counts in expected.items():
        assert sorted(found[name].values()) == sorted(counts.values())
    text, usable = check_uploads(folder)
    assert usable
    assert f"{int(sum(three.values()))} of 12 uploads are unshuffled" in text


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
DIFFERENCE = {"upload": "weight_difference", "lr": 0.1}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """One that can mask."""
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
    ("client", "shows"),
    [
        ({}, True),
        (DIFFERENCE, True),
        ({**DIFFERENCE, "optimizer": "adamw", "lr": 1e-3}, True),
        ({"defenses": ["dp_sgd 0 clip 0.1"]}, True),  # every gradient as a whole becomes smaller
        # zero rows are filled: every upload looked as if nothing had been masked
        ({**DIFFERENCE, "optimizer": "adamw", "lr": 1e-3, "defenses": ["dp_sgd 0.5"]}, False),
        ({"defenses": ["gaussian_noise 0.1"]}, False),
        ({"defenses": ["dp_sgd 1"]}, False),
        ({"position_noise": 0.1}, False),
        # rows are emptied: every upload looked as if something had been masked
        ({"defenses": ["prune 0.01"]}, False),
        ({"defenses": ["int8"]}, False),
        ({**DIFFERENCE, "lr": 1e-4, "defenses": ["prune 0.5"]}, False),
        ({**DIFFERENCE, "lr": 1e-6}, False),
    ],
    ids=str,
)
def test_errors_hide_what_was_masked(
    model: LoadedModel, client: dict[str, Any], shows: bool
) -> None:
    assert shown(model, **client) == ([0.0, 1.0, 0.0, 1.0] if shows else None)
