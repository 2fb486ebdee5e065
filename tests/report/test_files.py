"""Which parts a report has: what is shown, what is folded, what clients are called."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from mjp_privacy.core import progress
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report import write as data_files
from mjp_privacy.report.clients import attacked_ones
from mjp_privacy.report.contents import Contents, read_contents
from mjp_privacy.report.page import page as data
from mjp_privacy.report.write import ReportSummary, write_report
from tests.helpers.ladder_rows import ladder_run, simple_line
from tests.helpers.report_rows import (
    cell,
    intact,
)


def run_of(folder: Path, *dtypes: str) -> Contents:
    store = RunStore(folder)
    cells = [intact(dtype, attack="patch_gradient", dtype=dtype) for dtype in dtypes]
    store.write_cells(cells)
    for entry in cells:
        simple_line(store, entry, [20.0, 30.0])
    return read_contents([folder])


def test_lines_in_float64_are_folded_and_counted(tmp_path: Path) -> None:
    contents = run_of(tmp_path, "float32", "float64")
    shown, all_ = contents.main(folded=False), contents.main(folded=True)
    assert [row[0] for row in shown.rows] == ["1"]
    assert "1 lines in float64 are left out" in shown.caption.replace("1 line in", "1 lines in")
    assert [row[0] for row in all_.rows] == ["1", "2"]
    assert "left out" not in all_.caption


def test_a_run_without_attacks_has_contents_all_the_same(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("grey", attack="grey", role="floor")
    store.write_cells([entry])
    simple_line(store, entry, [11.0])
    contents = read_contents([tmp_path])
    assert contents.strip is None
    assert attacked_ones(contents.clients) == []
    assert contents.comparisons == []
    assert len(contents.main(folded=False).rows) == 1


# the files of a report, read by parsers, and the console ------------------------------------------

TEXTS = (
    *("table5.md", "table5.tex", "table5.csv"),
    "index.html",
    "table.md",
    "table.tex",
    "table.csv",
    "samples.csv",
)


def test_every_file_is_there(written: tuple[Path, ReportSummary]) -> None:
    out, summary = written
    assert {path.relative_to(out).as_posix() for path in summary.files} == {
        *TEXTS,
        *("figures/strip.png", "pictures/index.csv"),
        *(f"figures/{name}.svg" for name in ("lpips", "spread", "success")),
    }
    assert summary.files[0] == out / "index.html"
    assert all(path.stat().st_size for path in summary.files)
    assert not list(out.rglob("*.tmp"))


def test_summary_counts_failures(written: tuple[Path, ReportSummary], run: Path) -> None:
    summary = written[1]
    assert (summary.lines, summary.failed_lines, summary.failed_images) == (8, 1, 6)
    assert summary.any_failed
    assert not write_report([run], run / "report").any_failed


def test_same_rows_same_bytes(written: tuple[Path, ReportSummary], tmp_path: Path) -> None:
    """Also from another folder, and with the images of a line in another order."""
    out = written[0]
    moved = tmp_path / "moved" / "run"
    shutil.copytree(out.parent / "run", moved)
    store = RunStore(moved)
    rows = store.read("plain").drop(columns="has_picture")
    kept = {image: store.pictures("plain", image) or {} for image in store.pictured("plain")}
    shutil.rmtree(moved / "rows" / "plain")
    about = {"made_with": {"device": "cpu"}}
    store.write("plain", 0, rows.iloc[::-1].reset_index(drop=True), kept, about)
    write_report([moved], tmp_path / "out")
    for name in ("table.md", "table.tex", "table.csv", "index.html"):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes(), name
    store.write("plain", 0, rows, kept, about)
    write_report([moved], tmp_path / "out")
    assert (tmp_path / "out/samples.csv").read_bytes() == (out / "samples.csv").read_bytes()


def test_progress_is_shown_on_a_terminal_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    write_report([run], tmp_path / "piped", pictures="none")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(Console, "is_terminal", True)
    write_report([run], tmp_path / "shown", pictures="none")
    out, shown = capsys.readouterr()
    assert not out
    assert "page" in shown
    assert "left" in shown


# what a report of very many rows leaves out, and where it says so ---------------------------------


def test_of_many_rows_a_text_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder_run(tmp_path / "run")
    out = tmp_path / "out"
    write_report([tmp_path / "run"], out)
    assert (out / "samples.csv").is_file()
    monkeypatch.setattr(data_files, "MOST_ROWS", 10)
    write_report([tmp_path / "run"], out)
    assert not (out / "samples.csv").exists()  # that of the earlier report is removed
    text = (out / "samples.txt").read_text()
    assert "read_parquet('run/rows/**/*.parquet'" in text
    assert str(tmp_path) not in text
    assert "samples.txt" in (out / "index.html").read_text()


def test_a_page_compares_line_by_line_on_some_of_many_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder_run(tmp_path / "run")
    contents = read_contents([tmp_path / "run"])
    assert data.page_images(contents) == contents.image_ids
    monkeypatch.setattr(data, "MOST_COMPARED", 1)
    first, *_, last = contents.image_ids
    assert data.page_images(contents) == [first, last]
    write_report([tmp_path / "run"], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "on 2 of them" in page
