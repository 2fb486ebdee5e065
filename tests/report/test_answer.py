"""The answer: whom it is about, what it says of the figures, and what it withholds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import WORDS
from mjp_privacy.report.card import Card
from mjp_privacy.report.contents import read_contents
from tests.helpers.card_run import card_of, card_of_lines
from tests.helpers.report_rows import (
    add_pictures,
    cell,
    image_id,
    image_rows,
    intact,
    write_rows,
)

MASKED = {"setting": "c", "gamma": 0.27}
WITHHELD = {"withhold": "pos_embed"}
ZERO = {"zero_rows": 3.0, "grey_psnr": 12.0}


# whom it is about ---------------------------------------------------------------------------------


def test_a_run_with_a_defence_speaks_of_the_defended_client_beside_none(tmp_path: Path) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("patch_gradient"), [30.0, 40.0], {"grey_psnr": 12.0}),
        (intact("token_span", **WITHHELD), [25.0, 8.0], {"grey_psnr": 12.0}),
    )
    assert made.rows[made.main].client == "plain, withhold pos embed"
    assert "withhold pos embed" in made.verdict
    assert "0 of 2 exactly" in made.beside


def test_mjp_comes_before_other_defences(tmp_path: Path) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("token_span", **WITHHELD), [9.0, 8.0], {"grey_psnr": 12.0}),
        (intact("patch_gradient"), [30.0, 40.0], {"grey_psnr": 12.0}),
        (intact("masked_span", **MASKED), [11.0, 10.0], ZERO),
    )
    assert made.rows[made.main].client == "MJP γ .27"


def test_a_defended_client_that_no_attack_knows_is_no_answer(tmp_path: Path) -> None:
    made = card_of_lines(
        tmp_path,
        (cell("april", **MASKED), [9.0], ZERO),
        (intact("patch_gradient"), [30.0], {"grey_psnr": 12.0}),
    )
    assert made.rows[made.main].client == "plain"


# the verdict --------------------------------------------------------------------------------------


def test_of_the_shuffled_setting_alone_it_speaks_of_the_shuffled_pictures(tmp_path: Path) -> None:
    of_b = {"setting": "b", "gamma": 0.27}
    made = card_of_lines(tmp_path, (intact("masked_span", **of_b), [math.inf, math.inf], ZERO))
    assert "the shuffled pictures" in made.verdict
    assert "these pictures" not in made.verdict


def test_what_reaches_20_db_without_any_gradient_shows_no_leak(tmp_path: Path) -> None:
    smooth = {"zero_rows": 3.0, "grey_psnr": 24.0}
    line = (intact("masked_span", **MASKED), [29.0, 28.0, 12.0, 11.0], smooth)
    assert "is not shown" in card_of_lines(tmp_path, line).verdict


@pytest.mark.parametrize(
    ("psnrs", "parts"),
    [
        ([math.inf, 30.0, 12.0], ["does not protect these", "1 of 3 exactly", "2 at 20 dB"]),
        ([21.0, 30.0, 12.0], ["does not protect these", "2 of 3 at 20 dB"]),
        ([21.0, 11.0, 12.0], ["does not protect all", "1 of 3"]),
        ([19.9, 11.0, 12.0], ["not shown"]),
        ([9.0, 11.0, 10.0], ["not shown", "failed"]),
    ],
)
def test_the_verdict_of_a_defended_client(
    tmp_path: Path, psnrs: list[float], parts: list[str]
) -> None:
    made = card_of_lines(tmp_path, (intact("masked_span", **MASKED), psnrs, ZERO))
    assert all(part in made.verdict for part in ["MJP γ .27", *parts])
    assert len(made.verdict.split()) <= WORDS


def test_the_verdict_of_an_undefended_client(tmp_path: Path) -> None:
    made = card_of_lines(tmp_path, (intact("patch_gradient"), [30.0, math.inf], {}))
    assert "protect" not in made.verdict
    assert "1 of 2 exactly" in made.verdict


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_missing_rows_are_said_where_the_figure_stands(tmp_path: Path, lost: int) -> None:
    """Of an attack that lacks some of its rows, or all: a weaker one takes its place."""
    strong = intact("pixel_lattice", **MASKED, planned_images=2)
    made = card_of_lines(
        tmp_path,
        (intact("masked_span", **MASKED, planned_images=2), [22.0, 21.0], ZERO),
        (strong, [90.0, 80.0][: 2 - lost], ZERO),
    )
    figure = made.rows[made.main].one_upload
    assert figure is not None
    assert figure.flagged("unfinished") == bool(lost)
    assert ("rows are missing" in made.verdict) == bool(lost)


@pytest.mark.parametrize(("attack", "said"), [("pixel_lattice", True), ("masked_span", False)])
def test_an_assumption_is_named_where_the_chosen_attack_makes_it(
    tmp_path: Path, attack: str, said: bool
) -> None:
    made = card_of_lines(tmp_path, (intact(attack, **MASKED), [30.0], {}))
    assert ("8-bit" in made.assumptions) == said
    assert "batch 1" in made.assumptions
    assert "as declared" in made.assumptions


# how many uploads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("six", "uploads"), [(["unsupported"] * 2, 2), (["failed"] * 2, 2), ([60.0, "failed"], 6)]
)
def test_only_uploads_of_an_attack_with_a_result_are_said(
    tmp_path: Path, six: list[float | str], uploads: int
) -> None:
    rounds = [
        intact(f"r{n}", attack_name="multi_round", attack=f"multi_round ({n})", uploads=n)
        for n in (2, 6)
    ]
    made = card_of_lines(
        tmp_path,
        (intact("patch_gradient"), [30.0, 40.0], {}),
        (rounds[0], [50.0] * 2, {}),
        (rounds[1], six, {}),
    )
    assert f"{uploads} uploads of the same picture" in made.beside
    derived = [line for line in read_contents([tmp_path]).derived if line.uploads > 1]
    assert {line.uploads for line in derived} == {uploads}


@pytest.mark.parametrize(
    ("april", "words"),
    [
        ("unsupported", "does not apply"),
        ("failed", "failed"),
        ("unscored", "not scored"),
        (None, "not run"),
    ],
)
def test_why_there_is_no_figure(tmp_path: Path, april: str | None, words: str) -> None:
    lines = [(intact("patch_gradient"), [30.0], {})]
    if april:
        lines.insert(0, (intact("april", victim="april_block"), [april], {}))
    (row,) = card_of_lines(tmp_path, *lines).rows
    assert row.published is None
    assert row.absent_of("published") == words


# without truth ------------------------------------------------------------------------------------


def without_truth(tmp_path: Path, residuals: list[float], **facts: object) -> Card:
    store = RunStore(tmp_path)
    entry = intact("masked_span", **facts)
    store.write_cells([entry])
    names = [image_id(i) for i in range(len(residuals))]
    rows = []
    for name, value in zip(names, residuals, strict=True):
        scores = image_rows(entry, name, 0.0, status="unscored", reason="no truth")
        residual = {"metric": "gradient_residual", "variant": "diagnostic", "value": value}
        rows += [*scores, scores[0] | residual | {"status": "ok", "reason": ""}]
    write_rows(store, entry, rows)
    pictures = {"images": torch.rand(len(names), 3, 8, 8)}
    add_pictures(store, "masked_span", pictures, names)
    return card_of(tmp_path)


@pytest.mark.parametrize(
    ("residuals", "facts", "parts", "absent"),
    [
        ([1.3e-6], {}, ["1 picture", "1.3e-06", "no proof"], "certain"),
        ([1e-3, 3e-3], {}, ["2 pictures", "0.002"], "safety"),
        ([1e-3], MASKED, ["no proof", "0.001"], "certain"),
        ([0.8], {}, ["no evidence of safety", "0.8"], "certain"),
        ([0.05, 0.05], {}, ["0.05"], "safety"),
    ],
)
def test_uploads_without_truth(
    tmp_path: Path, residuals: list[float], facts: dict[str, object], parts: list[str], absent: str
) -> None:
    made = without_truth(tmp_path, residuals, **facts)
    assert "exactly" not in made.verdict
    assert all(part in made.beside for part in parts)
    assert absent not in made.beside
