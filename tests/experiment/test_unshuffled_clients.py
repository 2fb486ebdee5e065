"""Nothing is said of unshuffled uploads where zero rows and masks are not the same thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mjp_privacy.experiment.unshuffled import shows_no_mask, unshuffled_uploads

from attacks.equations.names import TABLE
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.experiment.check_uploads import check_uploads
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.loading import load_runs
from mjp_privacy.report.unshuffled import unshuffled_images
from tests.helpers.federations import MJP, run
from tests.helpers.runs import MJP as TINY_MJP

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


def test_an_image_is_left_out_by_itself(model: LoadedModel) -> None:
    """Whether an upload shows it does not depend on the other uploads of its block."""
    rates = (10.0**-power for power in torch.arange(1, 6, 0.1).tolist())
    seen = [shown(model, **{**DIFFERENCE, "lr": rate}) for rate in rates]
    assert seen[0] == EXPECTED
    assert seen[-1] is None
    for values in filter(None, seen):
        assert all(v != v or v == e for v, e in zip(values, EXPECTED, strict=True)), values
    assert any(values is not None and any(v != v for v in values) for values in seen)


@pytest.mark.parametrize("defense", ["prune 0.05", "gaussian_noise 0.5"])
def test_check_rows_and_notes_are_silent(tmp_path: Path, defense: str) -> None:
    """Recorded without the truth, so that nobody but the uploads could tell."""
    uploads = (
        run(
            tmp_path,
            model=MJP,
            gamma=0.5,
            client={"batch": 1, "plain_share": 0.5, "defenses": [defense]},
            record={"rounds": [1], "images": 4, "probes": [{"uploads": 1}]},
        )
        / "uploads"
    )
    (uploads / "truth").rename(tmp_path / "truth")
    assert "uploads are unshuffled" not in check_uploads(uploads)[0]
    experiment = load_experiment({"name": "x", "attacks": [{"name": "mask_locator"}]})
    attack_uploads(experiment, uploads, tmp_path / "attacked", device="cpu")
    store = RunStore(tmp_path / "attacked")
    (cell,) = store.read_cells()
    assert "unshuffled_uploads" not in set(store.read_rows(cell["run_id"])["metric"])
    assert not any(map(unshuffled_images, load_runs([tmp_path / "attacked"]).lines))
    contents = read_contents([tmp_path / "attacked"])
    notes = [item for section in contents.notes for item in section.items]
    assert not any(note.startswith("Unshuffled") for note in notes)
