"""Uploads in which nothing was shuffled are marked: in rows, by `check`, on the card, in notes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.experiment.check_uploads import check_uploads
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.contents import read_contents
from tests.helpers.federations import MJP, run

RECIPE: dict[str, Any] = {
    "model": MJP,
    "gamma": 0.5,
    "client": {"batch": 1, "plain_share": 0.5},
    "record": {"rounds": [1], "images": 4, "probes": [{"uploads": 3}]},
}
STATIONARY = {"prior": "stationary"}
ATTACKS = {
    "name": "attacks",
    "attacks": [
        {"name": "grey"},
        {"name": "masked_span", "options": STATIONARY},
        {"name": "mask_locator"},
        {"name": "multi_round", "options": {"uploads": 3, **STATIONARY}},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def attacked(folder: Path, out: Path) -> pd.DataFrame:
    attack_uploads(load_experiment(ATTACKS), folder, out, device="cpu")
    store = RunStore(out)
    return pd.concat([store.read_rows(entry["run_id"]) for entry in store.read_cells()])


def marked(rows: pd.DataFrame, attack: str) -> dict[str, float]:
    own = rows[(rows["attack"] == attack) & (rows["metric"] == "unshuffled_uploads")]
    return dict(zip(own["image_id"], own["value"], strict=True))


def test_rows_count_the_uploads_that_masked_nothing(folder: Path, tmp_path: Path) -> None:
    rows = attacked(folder, tmp_path)
    one, three = empty_masks(folder, 1), empty_masks(folder, 3)
    assert 0 < sum(one.values()) < 4
    assert sum(one.values()) < sum(three.values()) < 12
    assert marked(rows, "masked_span") == marked(rows, "mask_locator") == one
    assert marked(rows, "multi_round") == three
    assert marked(rows, "grey") == {}


def test_no_private_image_is_needed(folder: Path, tmp_path: Path) -> None:
    expected = empty_masks(folder, 1)
    truth = folder / "truth"
    truth.rename(tmp_path / "kept")
    try:
        rows = attacked(folder, tmp_path / "run")
        text, _ = check_uploads(folder)
    finally:
        (tmp_path / "kept").rename(truth)
    assert set(rows["status"]) == {"ok", "unscored", "unsupported"}
    assert sorted(marked(rows, "masked_span").values()) == sorted(expected.values())
    assert sorted(marked(rows, "mask_locator").values()) == sorted(expected.values())
    assert "uploads are unshuffled" in text


def test_check_counts_them(folder: Path) -> None:
    number = int(sum(empty_masks(folder, 3).values()))
    text, usable = check_uploads(folder)
    assert usable
    assert (
        f"  note   {number} of 12 uploads are unshuffled: no row of their gradient of pos_embed is "
        "zero, so no patch was masked, and their pictures come back as a plain client's do (b1s1_"
    ) in text


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("a client that never shuffles", {"gamma": 0.0, "client": {"batch": 1}}),
        ("every step shuffled", {"client": {"batch": 1}}),
        (
            "masks hide each other in a batch",
            {"record": RECIPE["record"] | {"probes": [{"batch": 2}]}},
        ),
        (
            "several steps, too",
            {"client": {**RECIPE["client"], "steps": 2, "lr": 0.1, "upload": "weight_difference"}},
        ),
        ("nothing to see it by", {"client": {**RECIPE["client"], "withhold": ["pos_embed"]}}),
    ],
)
def test_nothing_is_said_where_it_is_not_so_or_not_seen(
    tmp_path: Path, what: str, changes: dict[str, Any]
) -> None:
    uploads = run(tmp_path, **{**RECIPE, **changes}) / "uploads"
    assert "unshuffled" not in check_uploads(uploads)[0], what
    assert sum(marked(attacked(uploads, tmp_path / "run"), "masked_span").values()) == 0, what


def test_one_plain_step_of_weights_shows_it(tmp_path: Path) -> None:
    """Also with weight decay, for which the weights of each upload's own round are needed."""
    client = RECIPE["client"] | {"lr": 0.1, "weight_decay": 0.1, "upload": "weight_difference"}
    changes = {"client": client, "server": {"optimizer": "sgd", "lr": 1.0}}
    uploads = run(tmp_path, **{**RECIPE, **changes}) / "uploads"
    number = int(sum(empty_masks(uploads, 3).values()))
    assert number
    assert f"{number} of 12 uploads are unshuffled" in check_uploads(uploads)[0]


def test_card_and_notes_go_by_what_was_recorded(folder: Path, tmp_path: Path) -> None:
    """The flag stands also where the header does not say that steps are left unshuffled."""
    uploads = tmp_path / "uploads"
    shutil.copytree(folder, uploads)
    for path in uploads.glob("*.json"):
        header = json.loads(path.read_text())
        header["recipe"].pop("plain_share", None)
        path.write_text(json.dumps(header))
    attacked(uploads, tmp_path / "run")
    contents = read_contents([tmp_path / "run"])
    assert all("u" in {flag.mark for flag in row.flags} for row in contents.card.rows)
    notes = [item for section in contents.notes for item in section.items]
    counts = [sum(map(bool, empty_masks(folder, n).values())) for n in (1, 3)]
    for count in counts:
        assert any(f"Unshuffled: {count} of 4 pictures have an upload in" in n for n in notes)


def test_an_attack_without_pictures_has_its_reason_in_the_table(
    folder: Path, tmp_path: Path
) -> None:
    """Its line has diagnostics, but a dash for every score."""
    attacked(folder, tmp_path)
    contents = read_contents([tmp_path])
    frame = contents.standard.frame.set_index("attack")
    reason = "the attack names the masked positions and makes no picture"
    assert frame.loc["mask_locator", "reason"] == reason
    assert frame.loc["masked_span", "reason"] == ""
    table = contents.main(folded=True)
    (line,) = (row for row in table.rows if "mask_locator" in row)
    assert line[-1] == reason
