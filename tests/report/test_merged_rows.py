"""Published rows of several files in one: models, runs, commits and scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.results import rows as published_rows
from mjp_privacy.report.results.merging import merge_published
from mjp_privacy.report.results.rows import (
    Published,
    published_facts,
    read_published,
    write_published,
)
from mjp_privacy.report.results.tables import render
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
    by_line = merged.rows.groupby("line")["model"].unique().map(list)
    assert by_line.to_dict() == {1: ["B"], 2: ["C"], 3: ["A"]}
    assert merged.rows["line"].dtype == np.int16


def test_lines_stand_in_the_order_of_their_models(new: Path, old: Path, tmp_path: Path) -> None:
    merge_published([new, old], tmp_path / "all.parquet", order=["A", "B"])
    assert [*scores(read_published(tmp_path / "all.parquet"))] == ["A", "B", "C"]


def test_what_the_first_file_holds_besides_is_left_out(
    new: Path, old: Path, tmp_path: Path
) -> None:
    """A run folder may hold models of earlier commands, older than what is published of them."""
    merge_published([new, old], tmp_path / "all.parquet", of_first=["C"])
    assert scores(read_published(tmp_path / "all.parquet")) == {"C": 30.0, "A": 10.0, "B": 11.0}


def test_a_run_keeps_its_name_and_its_commits_for_good(
    new: Path, old: Path, tmp_path: Path
) -> None:
    both, all_three = tmp_path / "both.parquet", tmp_path / "all.parquet"
    merge_published([new, old], both)
    third = published(tmp_path / "third", {"D": 40.0}, commit="d", threads=3)
    merge_published([third, both], all_three)
    runs = [(run.name, run.threads, run.commits) for run in read_published(all_three).runs]
    assert sorted(runs) == [("attack", 1, "a, b"), ("attack-2", 2, "b, c"), ("attack-3", 3, "d")]
    lines = {line.cell.model.label: line.run for line in read_published(all_three).lines}
    assert lines == {"D": "attack-3", "B": "attack-2", "C": "attack-2", "A": "attack"}
    frame = read_published(all_three).rows
    assert dict(zip(frame["model"], frame["run"], strict=True)) == lines


def test_commits_that_made_none_of_the_rows_go(tmp_path: Path) -> None:
    path = published(tmp_path / "1", {"A": 1.0, "B": 2.0}, commit="c1, c2")
    for number, model in ((3, "A"), (4, "B")):
        anew = published(tmp_path / str(number), {model: float(number)}, commit=f"c{number}")
        merge_published([anew, path], path)
    merged = read_published(path)
    assert {*merged.commit.split(", ")} == {"c3", "c4"}
    assert scores(merged) == {"B": 4.0, "A": 3.0}


def test_the_table_of_files_gives_each_run_its_own_commit(
    new: Path, old: Path, tmp_path: Path
) -> None:
    merge_published([new, old], tmp_path / "all.parquet")
    lines = render({"files": ["all.parquet"]}, {}, tmp_path).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert sorted((cell[4], cell[6]) for cell in cells) == [("a, b", "1"), ("b, c", "2")]


def test_rows_of_other_images_are_refused(new: Path, old: Path, tmp_path: Path) -> None:
    facts, frame = published_facts(old)
    facts["shared"]["data"] = "other pictures"
    published_rows.write_rows(frame, facts, old)
    with pytest.raises(
        UserError, match=r"expected rows of the same images, got data .*'other pict"
    ):
        merge_published([new, old], tmp_path / "all.parquet")


def test_facts_that_only_some_lines_share_come_back(new: Path, old: Path, tmp_path: Path) -> None:
    merge_published([new, old], tmp_path / "all.parquet")
    for line, part in zip(
        read_published(tmp_path / "all.parquet").lines,
        [*read_published(new).lines, read_published(old).lines[0]],
        strict=True,
    ):
        assert line.cell.columns == part.cell.columns
