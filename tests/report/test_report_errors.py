"""Every way a run folder can be wrong has its message."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore, write_pieces
from mjp_privacy.report.write import write_report
from tests.helpers.report_rows import (
    cell,
    small_run,
)


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
