"""`mjp report` of what is no run, and into what is no folder: one sentence each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore, write_pieces
from mjp_privacy.report.pictures import COLUMNS
from mjp_privacy.report.write import write_report
from tests.helpers.report_rows import (
    cell,
    small_run,
)


def empty(root: Path) -> Path:
    (root / "empty").mkdir()
    return root / "empty"


def foreign(root: Path) -> Path:
    (root / "photos").mkdir()
    (root / "photos" / "a.png").touch()
    return root / "photos"


def federation(root: Path) -> Path:
    small_run(root / "minute" / "attack")
    (root / "minute" / "metrics.jsonl").touch()
    return root / "minute"


def training(root: Path) -> Path:
    (root / "J").mkdir()
    (root / "J" / "metrics.jsonl").touch()
    return root / "J"


def earlier_report(root: Path) -> Path:
    (root / "report").mkdir()
    (root / "report" / "index.html").touch()
    return root / "report"


def several_runs(root: Path) -> Path:
    for number in range(7):
        small_run(root / "results" / str(number))
    return root / "results"


def an_earlier_run(root: Path) -> Path:
    """A folder of the version whose rows were no columns."""
    (root / "run").mkdir()
    (root / "run" / "cells.json").write_text('{"format": "sealed", "cells": []}')
    return root / "run"


def a_pipe(root: Path) -> Path:
    os.mkfifo(root / "pipe")
    return root / "pipe"


def a_pipe_for_cells(root: Path) -> Path:
    (root / "run").mkdir()
    os.mkfifo(root / "run" / f"cells.0001.{'0' * 16}.parquet")
    return root / "run"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (empty, "is not a run folder: expected cells.….parquet in it; the folder is empty."),
        (foreign, "got other files. Give the folder that was the --out"),
        (federation, "of a training or a federation. Give what lies in it: "),
        (training, "it is the folder of a training or a federation. Give the folder"),
        (earlier_report, "it is the folder of a report"),
        (several_runs, "/4 … (7 in all)"),
        (an_earlier_run, "convert_run"),
        (a_pipe, "is a file. Give the folder"),
        (a_pipe_for_cells, "is not a run folder"),
        (lambda root: root / ("x" * 300), "is file name too long"),
    ],
)
def test_what_is_no_run(
    make: Callable[[Path], Path],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make(tmp_path)
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    if make is federation:
        assert str(run / "attack") in error


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("run", "is the run itself. Give another --out"),
        ("run/rows/report", "lies among the rows of the run. Give another --out, such as"),
        ("run/experiments", "lies among the experiments of the run"),
        ("file", "is a file. Give another --out"),
        ("file/below", "expected a folder, or a place where one can be made"),
        ("x" * 300, "is file name too long. Give another --out"),
        ("link", "expected a folder, or a place where one can be made"),
        ("folders", "The report cannot be written into"),
    ],
)
def test_where_no_report_can_be(
    out: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "run")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folders" / "index.html").mkdir(parents=True)
    assert main(["report", str(run), "--out", str(tmp_path / out)]) == 2
    assert expected in capsys.readouterr().err


DAMAGED = {
    "nothing": "",
    "zero byte": "\0",
    "half a line": ",".join(COLUMNS) + "\nplain,april,1,a,plain/april/a.png,1,1,\nplain,ap",
    "open quote": ",".join(COLUMNS) + '\n"plain',
    "column twice": ",".join((*COLUMNS, "file")) + "\n",
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


def test_a_run_may_lie_in_the_folder_of_its_report(tmp_path: Path) -> None:
    assert main(["report", str(small_run(tmp_path / "run")), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "index.html").is_file()


def test_a_report_of_one_run_lies_in_it_and_of_several_needs_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    small_run(run)
    assert main(["report", str(run), str(run)]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["report", str(run)]) == 0
    assert (run / "report" / "index.html").is_file()


# every way a run folder can be wrong has its message ----------------------------------------------


def a_file(tmp_path: Path) -> list[Path]:
    (tmp_path / "file").touch()
    return [tmp_path / "file"]


def no_run(tmp_path: Path) -> list[Path]:
    (tmp_path / "folder").mkdir()
    return [tmp_path / "folder"]


def twice(tmp_path: Path) -> list[Path]:
    small_run(tmp_path / "run")
    return [tmp_path / "run", tmp_path / "other" / ".." / "run"]


def no_cells(tmp_path: Path) -> list[Path]:
    RunStore(tmp_path / "run").write_cells([])
    return [tmp_path / "run"]


def no_rows(tmp_path: Path) -> list[Path]:
    RunStore(tmp_path / "run").write_cells([cell("x"), cell("y")])
    return [tmp_path / "run"]


def an_earlier_version(tmp_path: Path) -> list[Path]:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/cells.json").write_text(json.dumps({"cells": []}))
    return [tmp_path / "run"]


def a_cell_that_lacks_its_attack(tmp_path: Path) -> list[Path]:
    entry = cell("x")
    del entry["attack"]
    RunStore(tmp_path / "run").write_cells([entry])
    return [tmp_path / "run"]


def broken_rows(tmp_path: Path) -> list[Path]:
    small_run(tmp_path / "run")
    (file,) = RunStore(tmp_path / "run").files("small")
    file.path.write_bytes(b"PAR1 no more")
    return [tmp_path / "run"]


def rows_that_lack_a_column(tmp_path: Path) -> list[Path]:
    store = RunStore(small_run(tmp_path / "run"))
    store.write("small", 0, store.read("small").drop(columns="status"))
    return [tmp_path / "run"]


def an_image_twice(tmp_path: Path) -> list[Path]:
    store = RunStore(small_run(tmp_path / "run"))
    files = store.files("small")
    table = pq.read_table(files[0].path)
    write_pieces(store.folder("small"), "00000", files, table.schema, [table, table.slice(0, 1)])
    return [tmp_path / "run"]


def an_unknown_status(tmp_path: Path) -> list[Path]:
    store = RunStore(small_run(tmp_path / "run"))
    store.write("small", 0, store.read("small").assign(status="fine"))
    return [tmp_path / "run"]


def an_unknown_paper_row(tmp_path: Path) -> list[Path]:
    paper = {"model": "DeiT-S+MPJ", "setting": "a"}
    return [small_run(tmp_path / "run", paper_row=paper)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: [], "Expected one or more run folders, got none"),
        (lambda tmp_path: [tmp_path / "nowhere"], "does not exist. Give the folder"),
        (a_file, "is a file. Give the folder"),
        (no_run, "is not a run folder"),
        (twice, "is the same folder as .* Name it once"),
        (no_cells, "is an empty run: expected at least one cell"),
        (no_rows, r"is an empty run: expected rows of its 2 cell\(s\)"),
        (an_earlier_version, r"cells\.json.*convert_run"),
        (
            a_cell_that_lacks_its_attack,
            "cell 0: .* one without attack",
        ),
        (broken_rows, r"all of its rows are damaged \(rows/small/00000\..*Run the attack ag"),
        (rows_that_lack_a_column, "no column status"),
        (an_image_twice, "rows/small/.*an image twice"),
        (an_unknown_status, "rows/small/.*status.*fine"),
        (an_unknown_paper_row, r"got model 'DeiT-S\+MPJ'.*Did you mean DeiT-S\+MJP a\?"),
    ],
)
def test_errors_say_what_to_do(
    tmp_path: Path, make: Callable[[Path], list[Path]], message: str
) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=message):
        write_report(make(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_out_must_be_a_folder(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match="is a file"):
        write_report([run], tmp_path / "out")
