"""The files of a report, read by parsers, and the console."""

import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mjp_privacy.core import progress
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.statistics import bootstrap_interval
from mjp_privacy.report.console import WIDTH, console_table
from mjp_privacy.report.figures import build_table
from mjp_privacy.report.lines import Line
from mjp_privacy.report.tables.text import latex_text, markdown_text, number
from mjp_privacy.report.write import ReportSummary, write_report
from tests.helpers.report_rows import (
    COUNT,
    HOSTILE,
    cell,
    image_id,
    image_rows,
    only_line,
    psnr_values,
    write_rows,
)

TEXTS = (
    *("table5.md", "table5.tex", "table5.csv"),
    "index.html",
    "table.md",
    "table.tex",
    "table.csv",
    "samples.csv",
)


TITLES_OF_ALL = (
    *("Ceilings and the linear system", "Every line, metrics as the paper defines them"),
    "Time",
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
    pictures = {image: store.pictures("plain", image) for image in store.pictured("plain")}
    kept = [([i], {n: t[None] for n, t in (of or {}).items()}) for i, of in pictures.items()]
    shutil.rmtree(moved / "rows" / "plain")
    about = {"made_with": {"device": "cpu"}}
    store.write("plain", 0, rows.iloc[::-1].reset_index(drop=True), kept, about)
    write_report([moved], tmp_path / "out")
    for name in ("table.md", "table.tex", "table.csv", "index.html"):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes(), name
    store.write("plain", 0, rows, kept, about)
    write_report([moved], tmp_path / "out")
    assert (tmp_path / "out/samples.csv").read_bytes() == (out / "samples.csv").read_bytes()


def test_what_an_earlier_version_wrote_is_removed(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    stale = ("table.html", "figures/overview.png", "figures/comparison.png", "figures/psnr.png")
    for name in (*stale, "figures/line_007_of_an_earlier_report.png", "mine.html"):
        (out / name).touch()
    write_report([run], out)
    assert not any((out / name).exists() for name in stale)
    assert not list(out.glob("figures/line_*"))
    assert (out / "mine.html").exists()


def test_page_is_escaped(written: tuple[Path, ReportSummary]) -> None:
    """The page as a whole has tests of its own; this one has a run with a hostile label."""
    text = (written[0] / "index.html").read_text()
    assert HOSTILE.split("&")[0] not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_page_links_what_lies_beside_it(written: tuple[Path, ReportSummary]) -> None:
    out, summary = written
    text = (out / "index.html").read_text()
    for path in summary.files[1:]:
        assert f'href="{path.relative_to(out).as_posix()}"' in text


def test_latex_is_escaped() -> None:
    escaped = latex_text(HOSTILE)
    assert escaped == (
        r"\textless{}script\textgreater{}alert(1)\textless{}/script\textgreater{} \& 50\%\_x"
        r"\textbar{}y \$\textasciicircum{}2\$ \{\textbackslash{}o\}"
    )
    assert latex_text("≥ 20 dB, ‖x‖, ρ") == r"$\geq$ 20 dB, $\|$x$\|$, $\rho$"
    assert latex_text("γ ↑ ↓ − – †") == r"$\gamma$ $\uparrow$ $\downarrow$ $-$ -- \textdagger{}"


def test_latex_tables_have_equal_columns(everything: tuple[Path, ReportSummary]) -> None:
    text = (everything[0] / "table.tex").read_text()
    assert text.isascii()
    for body in re.findall(r"\\begin\{tabular\}(.*?)\\end\{tabular\}", text, re.S):
        align = re.match(r"\{([lr]+)\}", body)
        assert align
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in rows} == {len(align[1])}
    opened = re.findall(r"\\begin\{(.*?)\}", text)
    assert sorted(opened) == sorted(re.findall(r"\\end\{(.*?)\}", text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b", r"a\|b"),
        ("![x](http://a.example)", r"![x]\(http\://a.example)"),
        ("[x] (y)", "[x] (y)"),
        ("plain \u202etxt.exe\x1b[31m", "plain  txt.exe [31m"),
        ("one\ntwo\r", "one two"),
        ("<b>&`*", r"&lt;b&gt;&amp;\`\*"),
    ],
)
def test_markdown_makes_no_links_and_hides_nothing(text: str, expected: str) -> None:
    assert markdown_text(text).strip() == expected


def test_medians_at_the_cap_are_named_in_every_table(
    everything: tuple[Path, ReportSummary],
) -> None:
    """Of the line that recovers all pictures: around 130 dB, a quarter of them exactly."""
    text = (everything[0] / "table.md").read_text()
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    found = 0
    for table in tables:
        header, _, *rows = (
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in table.splitlines()
        )
        medians = {"median", "PSNR median"} & set(header)
        found += sum(row[header.index(name)] == "≥ 100" for row in rows for name in medians)
    assert found == 4  # of every client, every line in both variants, and ceilings
    assert not re.search(r"\b1[0-4]\d\.\d\d\b", "".join(tables))


@pytest.mark.parametrize("fixture", ["written", "everything"])
def test_markdown_tables_have_equal_columns(request: pytest.FixtureRequest, fixture: str) -> None:
    out, _ = request.getfixturevalue(fixture)
    text = (out / "table.md").read_text()
    assert markdown_text(HOSTILE) in text
    assert "<script" not in text
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles[: len(tables)] == [
        *("What leaks", "Table 5", "Every client", "Beside the paper", "Every line"),
        *(TITLES_OF_ALL if fixture == "everything" else ()),
    ]
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((math.nan, "–"), (None, "–"), (math.inf, "inf"), (0.0, "0.00"), (1.234, "1.23")),
        *((1e-5, "1.0e-05"), (-0.001, "-1.0e-03")),
    ],
)
def test_numbers(value: float | None, expected: str) -> None:
    assert number(value, 2) == expected


def test_console_fits(everything: tuple[Path, ReportSummary]) -> None:
    text = everything[1].console
    assert max(map(len, text.splitlines())) <= WIDTH
    words = text.split()
    values = np.array([v for i, v in enumerate(psnr_values(1, COUNT)) if i not in (3, 4)])
    low, high = bootstrap_interval(values)
    for expected in (f"{values.mean():.2f}", f"±{(high - low) / 2:.2f}", "unsupp"):
        assert expected in words
    assert "≥ 100" in text
    assert "line 4: unsupported: needs N + 1 <= D" in text


def test_the_short_console_is_the_card_and_the_reasons(
    written: tuple[Path, ReportSummary],
) -> None:
    card, reasons = written[1].console.split("\n\n")[-2:]
    assert len(written[1].console.splitlines()) <= 12 + 1 + 5
    assert "1 line unsupported: needs N + 1 <= D (line 4)" in reasons
    assert "2 images failed: lstsq did not converge (line 1)" in reasons
    assert "±" not in card + reasons


def test_console_fits_with_long_names(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("x", model="a model " * 9 + "w" * 50, attack="masked_span" * 4)
    store.write_cells([entry])
    write_rows(store, entry, image_rows(entry, image_id(0), 15.0))
    line = only_line(tmp_path)
    line = Line(1, "run" * 40, line.cell, line.table, store)
    text = console_table(build_table([line], "standard"), many_runs=True)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "15.00" in text


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
