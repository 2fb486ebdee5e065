"""Published rows of several files in one: models, runs, commits and scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.results.merging import merge_published
from mjp_privacy.report.results.rows import Published, read_published, write_published
from tests.helpers.report_rows import cell, image_rows, write_rows


def published(folder: Path, values: dict[str, float], *, commit: str, threads: int = 1) -> Path:
    """A file with one line for each model, whose only image has this PSNR."""
    store, entries = RunStore(folder / "attack"), []
    for number, (model, value) in enumerate(values.items()):
        entry = cell(f"{number:016d}", attack="token_span", model=model, setting="a")
        write_rows(store, entry, image_rows(entry, "image", value))
        entries.append(entry)
    store.write_cells(entries)
    (store.root / "experiment.yaml").write_text("experiment: {name: planted}\n")
    (store.root / "log.jsonl").write_text(f'{{"time": 0, "threads": {threads}}}\n')
    write_published([store.root], folder / "rows.parquet", commit=commit)
    return folder / "rows.parquet"


def scores(merged: Published) -> dict[str, float]:
    return {
        line.cell.model.label: float(line.scored("psnr", "standard").iloc[0])
        for line in merged.lines
    }


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return published(tmp_path / "new", {"B": 20.0, "C": 30.0}, commit="b, c", threads=2)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return published(tmp_path / "old", {"A": 10.0, "B": 11.0}, commit="a, b")


def test_a_model_of_several_files_is_taken_whole_from_the_first(
    new: Path, old: Path, tmp_path: Path
) -> None:
    merge_published([new, old], tmp_path / "all.parquet")
    merged = read_published(tmp_path / "all.parquet")
    assert scores(merged) == {"B": 20.0, "C": 30.0, "A": 10.0}
    assert [line.number for line in merged.lines] == [1, 2, 3]
    assert merged.rows.groupby("line")["model"].unique().map(list).to_dict() == {
        1: ["B"],
        2: ["C"],
        3: ["A"],
    }
    assert merged.commit == "b, c, a"


def test_runs_of_one_name_are_told_apart(new: Path, old: Path, tmp_path: Path) -> None:
    merge_published([new, old], tmp_path / "all.parquet")
    merged = read_published(tmp_path / "all.parquet")
    assert [(run.name, run.threads) for run in merged.runs] == [("attack", 2), ("attack-2", 1)]
    assert [line.run for line in merged.lines] == ["attack", "attack", "attack-2"]
    assert [*merged.rows["run"]] == [line.run for line in merged.lines]


def test_a_file_of_which_nothing_is_taken_leaves_no_trace(
    new: Path, old: Path, tmp_path: Path
) -> None:
    merge_published([new, old], tmp_path / "all.parquet")
    merge_published([tmp_path / "all.parquet", old], tmp_path / "again.parquet")
    again, merged = (read_published(tmp_path / f"{name}.parquet") for name in ("again", "all"))
    assert (again.commit, again.runs) == (merged.commit, merged.runs)
    assert again.rows.equals(merged.rows)
    assert again.rows["line"].dtype == np.int16


def test_facts_that_only_some_lines_share_come_back(new: Path, old: Path, tmp_path: Path) -> None:
    merge_published([new, old], tmp_path / "all.parquet")
    for line, part in zip(
        read_published(tmp_path / "all.parquet").lines,
        [*read_published(new).lines, read_published(old).lines[0]],
        strict=True,
    ):
        assert line.cell.columns == part.cell.columns
