"""Who stands on the card, for whom there is no best, and what lines on different images share."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import CARD_ROWS
from mjp_privacy.report.write import write_report
from tests.helpers.card_run import (
    card_of,
    card_of_lines,
    keys,
)
from tests.helpers.ladder_rows import simple_line
from tests.helpers.report_rows import (
    cell,
    image_id,
    image_rows,
    intact,
    wide,
    write_pictures,
)

MASKED = {"setting": "c", "gamma": 0.27}


def numbers(text: str) -> list[float]:
    """The numbers in a sentence; those in words such as float32 and in γ .27 are names."""
    return [float(found) for found in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", text)]


# who stands on it, and for whom there is no best --------------------------------------------------


def test_the_undefended_client_always_stands_on_it(tmp_path: Path) -> None:
    """Also where it comes last, and no attack that matches it was run."""
    gammas = [0.1 + i / 20 for i in range(CARD_ROWS + 2)]
    cells = [
        intact(f"{i}", attack="masked_span", setting="c", gamma=g) for i, g in enumerate(gammas)
    ]
    made = card_of_lines(
        tmp_path,
        *((entry, [20.0], {}) for entry in cells),
        (cell("plain"), [15.0], {}),
    )
    assert len(made.rows) == CARD_ROWS
    assert made.rows[0].client == "plain"
    assert not made.rows[0].defended
    assert made.further == len(gammas) + 1 - CARD_ROWS


SETTINGS_AND_PRECISIONS = [
    ({"float64 b": 40.0, "float64 c": 30.0, "float32 b": 20.0, "float32 c": 10.0}, 10.0),
    ({"float64 c": 30.0, "float32 b": 20.0, "float32 a": 10.0}, 30.0),
    ({"float32 a": 10.0, "float64 b": 30.0}, 30.0),
    ({"float64 a": 10.0, "bfloat16 a": 25.0, "float32 a": 30.0}, 25.0),
]


@pytest.mark.parametrize(("values", "expected"), SETTINGS_AND_PRECISIONS)
def test_one_client_in_several_settings_and_precisions_stands_once(
    tmp_path: Path, values: dict[str, float], expected: float
) -> None:
    """In the setting that asks for the plain picture, and there in the lowest precision."""
    cells = [
        intact(name, attack="masked_span", gamma=0.27, setting=setting, dtype=dtype)
        for name in values
        for dtype, setting in [name.split()]
    ]
    made = card_of_lines(tmp_path, *((entry, [values[entry["run_id"]]], {}) for entry in cells))
    (row,) = made.rows
    assert row.one_upload is not None
    assert (row.one_upload.mean, made.further) == (expected, 0)
    assert row.client.startswith("MJP γ .27")


def test_attacks_on_one_upload_have_no_worst_case_without_one_that_matches(tmp_path: Path) -> None:
    """Though one on several uploads does."""
    made = card_of_lines(
        tmp_path,
        (intact("patch_gradient", **MASKED), [9.0, 8.0], {"zero_rows": 50.0}),
        (intact("r", attack_name="multi_round", uploads=6, **MASKED), [30.0, 40.0], {}),
    )
    (row,) = made.rows
    assert row.one_upload is None
    assert row.any_uploads is not None
    assert row.any_uploads.mean == 35.0
    write_report([tmp_path], tmp_path / "out")
    table = pd.read_csv(tmp_path / "out/table.csv")
    derived = table[table["role"] != "attack"]
    assert set(derived["attack"]) == {"worst_case, any number of uploads"}
    assert json.loads(derived["chosen"].iloc[0]) == {"patch_gradient": 0, "r": 2}


def test_columns_of_another_version_do_not_stop_a_card(tmp_path: Path) -> None:
    other: dict[str, Any] = {"fact of tomorrow": ["a", {"b": 1}]}
    made = card_of_lines(tmp_path, (intact("patch_gradient", **other), [30.0], {}))
    assert made.rows[0].one_upload is not None


def test_uploads_that_only_could_not_be_scored_are_not_said_to_be_without_truth(
    tmp_path: Path,
) -> None:
    store = RunStore(tmp_path)
    entry = intact("masked_span", **MASKED)
    store.write_cells([entry])
    simple_line(store, entry, ["unscored"] * 2)
    write_pictures(store, entry, {image_id(i): 20.0 for i in range(2)})
    made = card_of(tmp_path)
    assert "images are known" in made.beside
    assert "not known" not in made.beside


# what lines on different images share -------------------------------------------------------------


def test_accuracy_and_grey_are_over_the_images_of_all_lines(tmp_path: Path) -> None:
    """Three lines on overlapping images, of which one attack failed on one and stored no grey."""
    hits = {0: 1.0, 1: 1.0, 2: 0.0, 3: 1.0, 4: 0.0, 5: 0.0, 6: 1.0}
    images = {"patch_gradient": range(4), "patch_prior": range(2, 6), "oracle_inverse": [6]}
    store = RunStore(tmp_path)
    entries = {name: intact(name) for name in images}
    entries["oracle_inverse"]["role"] = "ceiling"
    store.write_cells(list(entries.values()))
    for name, entry in entries.items():
        for i in images[name]:
            known: dict[str, Any] = {"status": "failed", "reason": "so it is"} if i == 1 else {}
            grey, top1 = {"grey_psnr": 10.0 + i}, {"intact": hits[i]}
            rows = image_rows(entry, image_id(i), 20.0, diagnostics=grey, top1=top1, **known)
            store.write(name, i, wide(rows).assign(run_id=name))
    made = card_of(tmp_path)
    (row,) = made.rows
    assert (row.accuracy, row.accuracy_n) == (50, 6)
    assert numbers(dict(made.facts)["Accuracy"])[:3] == [50, 1, 6]
    assert row.floor is not None
    assert row.floor.mean == pytest.approx(10 + (0 + 2 + 3 + 4 + 5 + 6) / 6)
    assert (row.floor.n, row.floor.of, row.floor.above_20) == (6, 6, 0)
    assert (
        keys(row.one_upload) == "cut_short partly_inapplicable unfinished"
    )  # four images of each attack, not the same ones


def test_a_side_of_the_floor_is_named_only_where_the_same_images_agree(tmp_path: Path) -> None:
    """The attack got an easy image alone: above its floor there, below the floor of both."""
    for name, floor, named, flags in (
        ("easy", [10.0, 30.0], False, "partly_inapplicable"),
        ("equal", [18.0, 18.0], True, "below_floor partly_inapplicable"),
        ("hard", [20.0, 2.0], False, "below_floor partly_inapplicable"),
    ):
        made = card_of_lines(
            tmp_path / name,
            (cell("april", first_block="closed_form"), [15.0, "failed"], {}),
            (intact("grey", role="floor", first_block="closed_form"), list(floor), {}),
        )
        (row,) = made.rows
        assert keys(row.published) == keys(row.one_upload) == flags
        assert ("the 18.0 dB without any" in made.beside) == named
        assert ("without any" in made.beside) == named
        assert ("failed" in made.verdict) == ("below_floor" in flags)


def test_an_undefended_client_that_is_not_alike_is_named(tmp_path: Path) -> None:
    for name, batch in (("alike", 1), ("not alike", 4)):
        made = card_of_lines(
            tmp_path / name,
            (intact("masked_span", **MASKED), [20.0, 30.0], {}),
            (intact("patch_gradient", batch=batch), [40.0, 50.0], {}),
        )
        assert ("plain · batch 4" in made.beside) == (batch == 4)
        assert numbers(made.beside)[-3:] == [0, 2, 20]
