"""`mjp report` of what is no run, and into what is no folder: one sentence that names it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mjp_privacy.cli import main
from mjp_privacy.experiment.store import RunStore, write_pieces
from mjp_privacy.report.pictures import COLUMNS
from tests.helpers.report_rows import cell, small_run

Make = Callable[[Path], object]


def file(name: str, text: str = "") -> Make:
    """A file in the folder that is given as a run."""

    def make(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

    return make


def federation(run: Path) -> None:
    small_run(run / "attack")
    (run / "metrics.jsonl").touch()


def several_runs(run: Path) -> None:
    for number in range(7):
        small_run(run / str(number))


def pipe(run: Path) -> None:
    run.mkdir()
    os.mkfifo(run / f"cells.0001.{'0' * 16}.parquet")


def without_its_attack(run: Path) -> None:
    entry = cell("x")
    del entry["attack"]
    RunStore(run).write_cells([entry])


def broken_rows(run: Path) -> None:
    (file,) = RunStore(small_run(run)).files("small")
    file.path.write_bytes(b"PAR1 no more")


def without_a_column(run: Path) -> None:
    store = RunStore(small_run(run))
    store.write("small", 0, store.read("small").drop(columns="status"))


def an_image_twice(run: Path) -> None:
    store = RunStore(small_run(run))
    table = pq.read_table(store.files("small")[0].path)
    write_pieces(store.folder("small"), "00000", table.schema, [table, table.slice(0, 1)])


def an_unknown_status(run: Path) -> None:
    store = RunStore(small_run(run))
    store.write("small", 0, store.read("small").assign(status="fine"))


def an_unknown_paper_row(run: Path) -> None:
    small_run(run, paper_row={"model": "DeiT-S+MPJ", "setting": "a"})


NO_RUNS: dict[str, tuple[Make, str]] = {
    "missing": (lambda run: None, "run"),
    "empty": (Path.mkdir, "empty"),
    "a file": (Path.touch, "is a file"),
    "a pipe": (os.mkfifo, "is a file"),
    "other files": (file("a.png"), "other files"),
    "a federation": (federation, "run/attack"),
    "a training": (file("metrics.jsonl"), "training"),
    "a report": (file("index.html"), "report"),
    "several runs": (several_runs, "run/4 … (7 in all)"),
    "an earlier version": (file("cells.json", '{"cells": []}'), "convert_run"),
    "a pipe for cells": (pipe, "is not a run folder"),
    "no cells": (lambda run: RunStore(run).write_cells([]), "empty run"),
    "no rows": (lambda run: RunStore(run).write_cells([cell("x"), cell("y")]), "2 cell(s)"),
    "no attack": (without_its_attack, "without attack"),
    "broken rows": (broken_rows, "rows/small/00000."),
    "no status": (without_a_column, "no column status"),
    "an image twice": (an_image_twice, "rows/small/"),
    "an unknown status": (an_unknown_status, "fine"),
    "an unknown row of the paper": (an_unknown_paper_row, "DeiT-S+MJP a"),
}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command ends."""
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize("kind", NO_RUNS)
def test_what_is_no_run(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, named = NO_RUNS[kind]
    run = tmp_path / "run"
    make(run)
    assert named in refused([str(run), "--out", str(tmp_path / "out")], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("second", ["run", "other/../run"])
def test_a_run_is_given_once(
    second: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    runs = [str(small_run(tmp_path / "run")), str(tmp_path / second)]
    assert "run" in refused([*runs, "--out", str(tmp_path / "out")], capsys)
    assert "--out" in refused(runs, capsys)


@pytest.mark.parametrize(
    ("out", "named"),
    [
        *(("run", "run"), ("run/rows/report", "rows"), ("run/experiments", "experiments")),
        *(("file", "file"), ("file/below", "file"), ("link", "link"), ("folders", "index.html")),
        ("x" * 300, "xxx"),
    ],
)
def test_where_no_report_can_be(
    out: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "run")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folders" / "index.html").mkdir(parents=True)
    assert named in refused([str(run), "--out", str(tmp_path / out)], capsys)


DAMAGED = {
    "nothing": "",
    "zero byte": "\0",
    "half a line": ",".join(COLUMNS) + "\nplain,april,1,a,plain/april/a.png,1,1,\nplain,ap",
    "open quote": ",".join(COLUMNS) + '\n"plain',
    "column twice": ",".join((*COLUMNS, "file")) + "\n",
    "of no report": "file,what\nplain/april/a.png,mine\n",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_list_of_pictures_is_written_anew(kind: str, tmp_path: Path) -> None:
    run, out = small_run(tmp_path / "run"), tmp_path / "out"
    picture = out / "pictures" / "plain" / "april" / "a.png"
    picture.parent.mkdir(parents=True)
    picture.touch()
    (out / "pictures" / "index.csv").write_text(DAMAGED[kind])
    assert main(["report", str(run), "--out", str(out), "--pictures", "all"]) == 0
    assert picture.exists() == (kind != "half a line")


def test_a_report_lies_in_its_run_or_around_it(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert (run / "report" / "index.html").is_file()
    assert main(["report", str(run), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "index.html").is_file()
