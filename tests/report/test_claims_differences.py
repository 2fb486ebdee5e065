"""The column of a published table that sets every line beside one of its lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.results.rows import write_published
from mjp_privacy.report.results.tables import render
from tests.helpers.report_rows import cell, image_rows, write_rows

SCORES: Mapping[str, Sequence[float | None]] = {
    "gradvit": [12.0, 13.0, 14.0, math.inf],
    "no prior": [12.5, 13.0, 14.1, math.inf],
    "squared": [11.0, None, 13.5, 90.0],
}
"""PSNR of four images by attack; None: the attack failed on it."""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Published rows of two models with three attacks each; the second's scores are 1 dB higher."""
    store, cells = RunStore(tmp_path / "run"), []
    for number, (model, shift) in enumerate([("plain", 0.0), ("other", 1.0)]):
        for place, (attack, scores) in enumerate(SCORES.items()):
            entry = cell(f"{3 * number + place:x}" * 16, attack=attack, model=model)
            rows = []
            for i, score in enumerate(scores):
                failed = {"status": "failed", "reason": "planted"} if score is None else {}
                rows += image_rows(entry, f"i{i}", (score or 0.0) + shift * (1 + i), **failed)
            write_rows(store, entry, rows)
            cells.append(entry)
    store.write_cells(cells)
    (store.root / "experiment.yaml").write_text("experiment: {name: planted}\n")
    write_published([store.root], tmp_path / "rows.parquet", commit="abc")
    return tmp_path


def table(results: Path, against: str = "gradvit", **selection: str) -> list[list[str]]:
    """The table's rows as cells, its head first."""
    every = {"rows": "rows.parquet", **selection}
    settings = {"name": "t", "every": every, "facts": ["attack"], "figures": ["n"]}
    text = render({**settings, "against": against}, {}, results)
    return [line.strip("| ").split(" | ") for line in text.splitlines() if "---" not in line]


def test_differences_are_those_of_a_hand_count(results: Path) -> None:
    head, base, prior, squared = table(results, model="plain")
    assert head == ["attack", "n", "− gradvit, paired [95 %]"]
    assert base == ["gradvit", "4", "–"]
    assert prior[2].startswith("+0.15 [0.")  # (.5 + 0 + .1 + 0) / 4; ∞ − ∞ counts as 0
    # 90 − min(∞, 100); the second image has no score
    assert squared[2].startswith(f"{np.mean([-1.0, -0.5, -10.0]):+.2f} [-10.00, -0.50]")
    assert squared[2].endswith(" (over 3)")


def test_a_line_is_set_beside_that_of_its_own_model(results: Path) -> None:
    rows = table(results)
    assert [row[2] for row in rows[1:4]] == [row[2] for row in table(results, model="plain")[1:]]
    assert [row[2] for row in rows[4:6]] == [row[2] for row in rows[1:3]]  # both 1 to 4 dB higher
    assert rows[6][2] == "-2.50 [-6.00, -0.50] (over 3)"  # 94 − min(∞, 100)


def test_a_run_without_the_base_is_set_beside_another_runs(results: Path) -> None:
    """One that has a base of its own is set beside that one."""
    for name, scores in (("second", {"longer": [13.0, 14.5]}), ("third", {"gradvit": [1.0]})):
        store, cells = RunStore(results / name), []
        for place, (attack, of_images) in enumerate(scores.items()):
            entry = cell(f"{name}{place}".encode().hex()[:16], attack=attack, model="plain")
            rows = [row for i, s in enumerate(of_images) for row in image_rows(entry, f"i{i}", s)]
            write_rows(store, entry, rows)
            cells.append(entry)
        store.write_cells(cells)
        (store.root / "experiment.yaml").write_text(f"experiment: {{name: {name}}}\n")
    runs = [results / "run", results / "second"]
    write_published(runs, results / "rows.parquet", commit="abc")
    rows = {row[0]: row[1:] for row in table(results, model="plain")}
    assert rows["longer"] == ["2", "+1.25 [1.00, 1.50]"]
    assert rows["no prior"][1].startswith("+0.15 [0.")
    write_published([*runs, results / "third"], results / "three.parquet", commit="abc")
    with pytest.raises(UserError, match="Expected one line of gradvit beside longer, got 2"):
        table(results, rows="three.parquet", model="plain")


def test_the_base_has_to_be_in_the_table(results: Path) -> None:
    with pytest.raises(UserError, match="Expected one line of april beside gradvit, got 0"):
        table(results, against="april")


def test_a_csv_has_no_images_to_compare(results: Path) -> None:
    (results / "rows.csv").write_text("attack,n\ngradvit,4\n", encoding="utf-8")
    settings = {"name": "t", "every": {"csv": "rows.csv"}, "facts": ["attack"], "figures": ["n"]}
    with pytest.raises(UserError, match="per-image rows, not of a CSV"):
        render({**settings, "against": "gradvit"}, {}, results)
