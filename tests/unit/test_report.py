"""A report of a made-up run: its figures by hand, its files by parsers, its errors one by one."""

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import torch
from report_fixtures import (
    HOSTILE,
    cell,
    image_id,
    image_rows,
    psnr_values,
    synthetic_run,
    write_pictures,
    write_rows,
)

from mjp_privacy.errors import UserError
from mjp_privacy.report import ReportSummary, write_report
from mjp_privacy.report.console import WIDTH, console_table
from mjp_privacy.report.export import SAMPLE_COLUMNS, latex_text, markdown_text
from mjp_privacy.report.loading import Line, load_runs
from mjp_privacy.report.notes import all_notes
from mjp_privacy.report.pictures import choose, examples, file_name, picture, shown_kinds
from mjp_privacy.report.published import METRICS, TABLE5, published_row
from mjp_privacy.report.tables import build_table
from mjp_privacy.report.views import number
from mjp_privacy.store import RunStore

COUNT = 24
TEXTS = ("table.md", "table.html", "table.tex", "table.csv", "samples.csv")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReportSummary]:
    """One report for all tests that only read it: RUN beside OUT."""
    folder = tmp_path_factory.mktemp("report")
    synthetic_run(folder / "run", COUNT)
    return folder / "out", write_report([folder / "run"], folder / "out")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one small line."""
    return small_run(tmp_path / "run")


def small_run(folder: Path, psnr: tuple[float, ...] = (10.0, 12.0, 14.0), **changes: Any) -> Path:
    store = RunStore(folder)
    entry = cell("small", **changes)
    store.write_cells([entry])
    rows = [row for i, value in enumerate(psnr) for row in image_rows(entry, image_id(i), value)]
    write_rows(store, entry, rows)
    return folder


def only_line(folder: Path) -> Line:
    (line,) = load_runs([folder]).lines
    return line


def frame(out: Path, variant: str) -> pd.DataFrame:
    table = pd.read_csv(out / "table.csv")
    return table[table["variant"] == variant].set_index("run_id")


def notes_of(folder: Path) -> str:
    return "\n".join(item for part in all_notes(load_runs([folder]).lines) for item in part.items)


# what the paper printed ---------------------------------------------------------------------------


PRINTED = """
1 ViT-S             a 78.1 .0278 .0039 19.27 .5203 .3623
1 DeiT-S            a 79.8 .0350 .0057 18.94 .5182 .3767
1 DeiT-S (w/o PEs)  a 77.5 .0379 .0082 20.22 .5912 .2692
1 DeiT-S+MJP        a 80.5 .1055 .0166 11.52 .4053 .6545
2 ViT-S             b 18.7 .0327 .0016 18.44 .6065 .2836
2 DeiT-S            b 36.0 .0391 .0024 17.60 .5991 .3355
2 DeiT-S (w/o PEs)  b 77.5 .0379 .0025 20.25 .6655 .2370
2 DeiT-S+MJP        b 62.9 .1043 .0059 11.66 .4493 .6519
3 DeiT-S+MJP (w/o)  a 40.6 .1043 .0059 11.66 .4493 .6519
4 DeiT-S+MJP        c 62.9 .1706 .0338 8.07 .0875 .8945
"""
"""Table 5 as the paper's text has it: Acc., MSE, FFT2D, PSNR, SSIM, LPIPS."""


def test_published_rows_are_the_papers() -> None:
    printed = []
    for line in PRINTED.strip().splitlines():
        found = re.fullmatch(r"(\d) (.*\S) +([abc]) (.*)", line)
        assert found
        scores = map(float, found[4].split())
        printed.append((int(found[1]), found[2], found[3], *scores))
    assert printed == [(r.group, r.model, r.setting, r.acc, *r.scores) for r in TABLE5]


def test_the_repeated_row_is_flagged() -> None:
    repeating = [row for row in TABLE5 if row.repeats]
    assert [row.label for row in repeating] == ["(3) DeiT-S+MJP (w/o) a"]
    original = published_row("DeiT-S+MJP", "b")
    assert repeating[0].repeats == original.label
    assert repeating[0].scores == original.scores
    assert repeating[0].acc != original.acc


def test_mean_psnr_is_above_the_psnr_of_the_mean_error_by_what_the_caveat_says() -> None:
    excess = [row.psnr + 10 * math.log10(row.mse) for row in TABLE5]
    assert max(excess) == pytest.approx(6.0, abs=0.05)


# figures by hand ----------------------------------------------------------------------------------


def test_line_by_hand(written: tuple[Path, ReportSummary]) -> None:
    line = frame(written[0], "paper").loc["plain"]
    psnr = np.array([v for i, v in enumerate(psnr_values(1, COUNT)) if i not in (3, 4)])
    assert line["psnr_mean"] == pytest.approx((1.01 * psnr).mean())
    assert line["psnr_median"] == pytest.approx(np.median(1.01 * psnr))
    mse = (1.01 * 10 ** (-psnr / 10)).mean()
    assert line["mse_mean"] == pytest.approx(mse)
    assert line["mse_paper"] == 0.0350
    assert line["mse_difference"] == pytest.approx(mse - 0.0350)
    assert line["psnr_lo"] < line["psnr_mean"] < line["psnr_hi"]
    half = 1.96 * (1.01 * psnr).std() / math.sqrt(len(psnr))
    assert line["psnr_hi"] - line["psnr_lo"] == pytest.approx(2 * half, rel=0.1)
    assert (line["n"], line["n_failed"], line["acc_n"]) == (COUNT - 2, 2, COUNT)
    assert line["acc_mean"] == pytest.approx(75.0)
    assert line["acc_altered_mean"] == 0.0
    assert (line["ceiling_mean"], line["ceiling_n"]) == (24.0, COUNT - 2)
    assert line["ceiling_distance"] == pytest.approx(24 - psnr.mean())
    assert line["cond_a_median"] == 1e6


def test_accuracy_has_a_difference_on_the_papers_images_only(tmp_path: Path) -> None:
    paper = {"model": "DeiT-S", "setting": "a"}
    differences = []
    for name, comparable in (("other", False), ("papers", True)):
        store = RunStore(tmp_path / name)
        entry = cell("x", paper_row=paper, data_is_papers=comparable)
        store.write_cells([entry])
        write_rows(store, entry, image_rows(entry, image_id(0), 20.0, top1={"intact": 1.0}))
        row = build_table([only_line(tmp_path / name)], "paper").frame.iloc[0]
        assert row["acc_paper"] == 79.8
        differences.append(row["acc_difference"])
    assert math.isnan(differences[0])
    assert differences[1] == pytest.approx(100 - 79.8)


def test_shuffled_line_by_hand(written: tuple[Path, ReportSummary]) -> None:
    line = frame(written[0], "standard").loc["shuffled"]
    patches = [0.0] + [50.0 + i % 3 for i in range(1, COUNT)]
    assert line["shuffled_patches_median"] == np.median(patches)
    assert line["empty_masks"] == 1
    assert line["cond_a_median"] == math.inf
    assert math.isnan(line["psnr_paper"])  # the standard variant stands beside nothing


def test_exact_images_are_capped_and_counted(written: tuple[Path, ReportSummary]) -> None:
    line = frame(written[0], "standard").loc["exact"]
    values = [math.inf if i % 4 == 0 else 130.0 + i for i in range(COUNT)]
    assert line["psnr_mean"] == 100.0
    assert line["psnr_exact"] == COUNT // 4
    assert line["psnr_median"] == np.median(values)


def test_lines_without_figures_say_why(written: tuple[Path, ReportSummary]) -> None:
    table = frame(written[0], "paper")
    assert list(table["line"]) == list(range(1, 9))
    assert table.loc["unsupported", ["status", "reason"]].tolist() == [
        *("unsupported", "needs N + 1 <= D")
    ]
    assert table.loc["interrupted", "status"] == "failed"
    assert "no rows stored" in table.loc["interrupted", "reason"]
    assert table.loc["unscored", ["n", "n_unscored"]].tolist() == [0, 5]
    assert math.isnan(table.loc["unscored", "acc_mean"])
    assert table.loc["all-failed", ["n", "n_failed"]].tolist() == [0, 4]
    assert table.loc["all-failed", "reason"] == "the gradient is not finite"
    assert table.loc["single", "n"] == 1
    assert math.isnan(table.loc["single", "psnr_lo"])
    markdown = (written[0] / "table.md").read_text()
    assert "| 9.60 [–] |" in markdown
    assert "unsupported: needs N + 1 &lt;= D |" in markdown
    assert "2 images failed: lstsq did not converge" in markdown
    assert "5 images unscored: no truth: a recorded upload" in markdown


def test_crops_are_resampled_by_photograph(tmp_path: Path) -> None:
    values = np.repeat([8.0, 12.0, 16.0, 20.0, 24.0], 8)
    folder = small_run(tmp_path / "run", tuple(values))
    plain = build_table([only_line(folder)], "standard").frame.iloc[0]
    store = RunStore(folder)
    rows = store.read_rows("small")
    shutil.rmtree(folder / "rows")
    store.write_rows("small", 0, rows.assign(group=rows["image_id"]))
    assert only_line(folder).groups is None  # each its own photograph
    rows["group"] = [f"photo {int(name[1:9]) // 8}" for name in rows["image_id"]]
    store.write_rows("small", 0, rows)
    grouped = build_table([only_line(folder)], "standard").frame.iloc[0]
    assert grouped["psnr_mean"] == plain["psnr_mean"]
    widths = [row["psnr_hi"] - row["psnr_lo"] for row in (grouped, plain)]
    assert widths[0] == pytest.approx(widths[1] * math.sqrt(8), rel=0.15)
    assert "crops of 5 photographs" in notes_of(folder)


def test_columns_appear_where_lines_would_look_alike(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    cells = [
        cell("x", cell_key="1", rounds=1),
        cell("y", cell_key="2", rounds=4, mode="train"),
        cell("no model", cell_key="3", rounds=4, size=0, status="failed", reason="no file"),
    ]
    store.write_cells(cells)
    for entry in cells[:2]:
        write_rows(store, entry, image_rows(entry, image_id(0), 15.0))
    table = build_table(load_runs([tmp_path]).lines, "paper")
    assert table.varying == ("mode", "rounds")
    assert table.frame["rounds"].tolist() == [1, 4, 4]


# notes --------------------------------------------------------------------------------------------


def test_notes_say_what_differs(written: tuple[Path, ReportSummary]) -> None:
    text = (written[0] / "table.md").read_text()
    for expected in (
        "not declared to be ImageNet-1K validation images as the paper's",
        "neither norm1 nor residuals",
        "(lines 1–2, 4–8)",
        "Client gradients in float64",
        "mode eval, loss cross_entropy, batch 1, no DAL in the loss",
        "A note of the runner. (line 1)",
        "although no row of A is zero",
        "(cond(A) over 2^24 on 7 of 22 images)",
        "A has zero rows, those of shuffled patches, on 24 of 24 images",
        "not over the same images",
        "repeats all five scores",
        "poster's caption says .27",
        "min(PSNR, 100)",
        "2000 resamples",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("psnr", "zero_rows", "said"),
    [
        (12.0, 0.0, "8.00 dB below the ceiling in the mean, although no row of A is zero"),
        (12.0, 3.0, "A has zero rows, those of shuffled patches, on 1 of 1 images"),
        (19.95, 0.0, ""),
    ],
)
def test_the_gap_to_the_ceiling_is_explained_by_what_was_measured(
    tmp_path: Path, psnr: float, zero_rows: float, said: str
) -> None:
    store = RunStore(tmp_path)
    entry = cell("x")
    store.write_cells([entry])
    diagnostics = {"cond_a": 1e9, "zero_rows": zero_rows, "ceiling_psnr": 20.0}
    write_rows(store, entry, image_rows(entry, image_id(0), psnr, diagnostics=diagnostics))
    text = notes_of(tmp_path)
    assert said in text
    assert ("below the ceiling" in text) == ("below the ceiling" in said)


def test_a_model_trained_with_the_altered_block_is_told_from_one_that_got_it(
    tmp_path: Path,
) -> None:
    for block, said in (
        ("closed_form", "was trained with the block that april needs"),
        ("intact", "carrying weights trained for the intact one"),
    ):
        store = RunStore(tmp_path / block)
        entry = cell("x", first_block=block)
        store.write_cells([entry])
        write_rows(store, entry, image_rows(entry, image_id(0), 12.0))
        assert said in notes_of(tmp_path / block)


def test_an_unfinished_line_says_so(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("x", planned_images=5)
    store.write_cells([entry])
    diagnostics = {"grey_psnr": 12.5, "ceiling_psnr": 20.0}
    write_rows(store, entry, image_rows(entry, image_id(0), 12.0, diagnostics=diagnostics))
    assert "UNFINISHED: 4 of 5 images were not run" in notes_of(tmp_path)
    lines = load_runs([tmp_path]).lines
    frame = build_table(lines, "paper").frame
    assert frame["n_not_run"].tolist() == [4]
    assert frame["grey_mean"].tolist() == [12.5]
    assert frame["below_grey"].tolist() == [100.0]
    summary = write_report([tmp_path], tmp_path / "out")
    assert "4 not run" in (tmp_path / "out" / "table.md").read_text()
    assert summary.any_failed


def test_many_reasons_are_cut_short(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("x")
    store.write_cells([entry])
    known = [{"status": "failed", "reason": f"reason {i}"} for i in range(7)]
    rows = [r for i, k in enumerate(known) for r in image_rows(entry, image_id(i), 0.0, **k)]
    write_rows(store, entry, rows)
    text = notes_of(tmp_path)
    assert "reason 4" in text
    assert "reason 5" not in text
    assert "2 further reasons, see samples.csv" in text


# files --------------------------------------------------------------------------------------------


def test_every_file_is_there(written: tuple[Path, ReportSummary]) -> None:
    out, summary = written
    assert {path.relative_to(out).as_posix() for path in summary.files} == {
        *TEXTS,
        *("figures/overview.png", "figures/comparison.png", "figures/psnr.png"),
        "figures/line_001_DeiT-S-a-april-float32.png",
        "figures/line_002_DeiT-S-b-april-float32.png",
        "figures/line_003_DeiT-S-a-patch_gradient-float64.png",
    }
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
    shutil.copytree(out.parent / "run", tmp_path / "moved")
    store = RunStore(tmp_path / "moved")
    rows = store.read_rows("plain")
    shutil.rmtree(tmp_path / "moved" / "rows" / "plain")
    turned = rows.iloc[::-1].reset_index(drop=True)
    store.write_rows("plain", 0, turned)
    write_report([tmp_path / "moved"], tmp_path / "out")
    for name in ("table.md", "table.html", "table.tex", "table.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes(), name
    store.write_rows("plain", 0, rows)
    write_report([tmp_path / "moved"], tmp_path / "out")
    assert (tmp_path / "out/samples.csv").read_bytes() == (out / "samples.csv").read_bytes()


def test_samples_hold_every_row(written: tuple[Path, ReportSummary]) -> None:
    out = written[0]
    with (out / "samples.csv").open(newline="") as file:
        samples = list(csv.DictReader(file))
    assert tuple(samples[0])[: len(SAMPLE_COLUMNS)] == SAMPLE_COLUMNS
    lines = load_runs([out.parent / "run"]).lines
    assert len(samples) == sum(max(1, len(line.rows)) for line in lines)
    exact = [s for s in samples if s["run_id"] == "exact" and s["image_id"] == image_id(0)]
    assert {s["value"] for s in exact if s["metric"] == "psnr"} == {"inf"}
    (unsupported,) = (s for s in samples if s["run_id"] == "unsupported")
    assert (unsupported["status"], unsupported["reason"]) == ("unsupported", "needs N + 1 <= D")
    first = next(s for s in samples if (s["metric"], s["variant"]) == ("psnr", "standard"))
    assert float(first["value"]) == psnr_values(1, COUNT)[0]  # full precision


class Page(HTMLParser):
    """Text, tags and sources of a page; a tag left open is an error."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_whole_and_escaped(written: tuple[Path, ReportSummary]) -> None:
    out = written[0]
    text = (out / "table.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.tags
    assert HOSTILE in page.text
    assert 'name="viewport"' in text
    assert len(page.sources) == 6
    assert all((out / unquote(source)).is_file() for source in page.sources)


def test_latex_is_escaped() -> None:
    escaped = latex_text(HOSTILE)
    assert escaped == (
        r"\textless{}script\textgreater{}alert(1)\textless{}/script\textgreater{} \& 50\%\_x"
        r"\textbar{}y \$\textasciicircum{}2\$ \{\textbackslash{}o\}"
    )
    assert latex_text("γ ↑ ↓ − – †") == r"$\gamma$ $\uparrow$ $\downarrow$ $-$ -- \textdagger{}"


def test_latex_tables_have_equal_columns(written: tuple[Path, ReportSummary]) -> None:
    text = (written[0] / "table.tex").read_text()
    assert text.isascii()
    for body in re.findall(r"\\begin\{tabular\}(.*?)\\end\{tabular\}", text, re.S):
        align = re.match(r"\{([lr]+)\}", body)
        assert align
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in rows} == {len(align[1])}
    opened = re.findall(r"\\begin\{(.*?)\}", text)
    assert sorted(opened) == sorted(re.findall(r"\\end\{(.*?)\}", text))


def test_markdown_tables_have_equal_columns(written: tuple[Path, ReportSummary]) -> None:
    text = (written[0] / "table.md").read_text()
    assert markdown_text(HOSTILE) in text
    assert "<script" not in text
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    assert len(tables) == 5
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


def test_seconds_per_image(written: tuple[Path, ReportSummary]) -> None:
    text = (written[0] / "table.md").read_text()
    assert f"| april | float32 | attack | cpu | 2 | {2 * COUNT} | {4 / COUNT:.3g} |" in text
    assert "Another machine gives other figures" in text


def test_figure_of_a_line_beside_the_papers(written: tuple[Path, ReportSummary]) -> None:
    text = (written[0] / "table.md").read_text()
    assert "|  | (2) DeiT-S b | paper | 36.0 | 0.0391 | 0.0024 | 17.60 | 0.5991 | 0.3355 |" in text
    assert "(3) DeiT-S+MJP (w/o) a †" in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((math.nan, "–"), (None, "–"), (math.inf, "inf"), (0.0, "0.00"), (1.234, "1.23")),
        *((1e-5, "1.0e-05"), (-0.001, "-1.0e-03")),
    ],
)
def test_numbers(value: float | None, expected: str) -> None:
    assert number(value, 2) == expected


# console ------------------------------------------------------------------------------------------


def test_console_fits(written: tuple[Path, ReportSummary]) -> None:
    text = written[1].console
    assert max(map(len, text.splitlines())) <= WIDTH
    words = text.split()
    for expected in ("18.62", "18.94", "-0.32", "±0.66", "100.00", "unsupp"):
        assert expected in words
    assert "line 4: unsupported: needs N + 1 <= D" in text


def test_console_fits_with_long_names(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("x", model="a model " * 9 + "w" * 50, attack="masked_span" * 4)
    store.write_cells([entry])
    write_rows(store, entry, image_rows(entry, image_id(0), 15.0))
    line = only_line(tmp_path)
    line = Line(1, "run" * 40, entry, line.rows, store)
    text = console_table(build_table([line], "paper"), many_runs=True)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "15.15" in text


# pictures -----------------------------------------------------------------------------------------


def test_images_are_quantiles(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", tuple(float(i) for i in range(21)))
    chosen = choose(only_line(folder))
    assert chosen == [(image_id(i), [q]) for i, q in ((1, 0.05), (5, 0.25), (10, 0.5))] + [
        (image_id(i), [q]) for i, q in ((15, 0.75), (19, 0.95))
    ]


def test_equal_scores_go_by_name_and_few_images_stand_for_more(tmp_path: Path) -> None:
    equal = only_line(small_run(tmp_path / "equal", (9.0, 9.0, 9.0)))
    assert [name for name, _ in choose(equal)] == [image_id(0), image_id(1), image_id(2)]
    two = only_line(small_run(tmp_path / "two", (12.0, 8.0)))
    assert choose(two) == [(image_id(1), [0.05, 0.25]), (image_id(0), [0.5, 0.75, 0.95])]


def test_the_input_is_shown_where_it_was_shuffled(written: tuple[Path, ReportSummary]) -> None:
    plain, shuffled, *_ = load_runs([written[0].parent / "run"]).lines
    assert shown_kinds(examples(plain)) == ["plain", "images"]
    assert shown_kinds(examples(shuffled)) == ["plain", "input", "images"]
    assert {example.against for example in examples(plain)} == {"the original"}
    assert {example.against for example in examples(shuffled)} == {"the shuffled input"}


def test_strip_shows_the_reconstruction(written: tuple[Path, ReportSummary]) -> None:
    """Not blank, and larger where there are three rows of pictures."""
    folder = written[0] / "figures"
    plain = matplotlib.image.imread(folder / "line_001_DeiT-S-a-april-float32.png")
    shuffled = matplotlib.image.imread(folder / "line_002_DeiT-S-b-april-float32.png")
    assert plain.shape[1] == shuffled.shape[1]
    assert plain.shape[0] < shuffled.shape[0]
    assert all(image[..., :3].std() > 0.1 for image in (plain, shuffled))


def test_a_run_without_reconstructions_has_no_strips(run: Path, tmp_path: Path) -> None:
    stale = tmp_path / "out" / "figures" / "line_007_of_an_earlier_report.png"
    stale.parent.mkdir(parents=True)
    stale.touch()
    stale.with_name("overview.png").touch()
    other = stale.with_name("mine.png")
    other.touch()
    summary = write_report([run], tmp_path / "out")
    assert [path.name for path in summary.files if path.suffix == ".png"] == ["psnr.png"]
    assert not stale.exists()
    assert not stale.with_name("overview.png").exists()
    assert other.exists()


def test_a_run_without_a_score_has_no_figures(tmp_path: Path) -> None:
    RunStore(tmp_path / "run").write_cells([cell("x", status="unsupported", reason="D < N + 1")])
    summary = write_report([tmp_path / "run"], tmp_path / "out")
    assert [path.name for path in summary.files] == list(TEXTS)
    assert not summary.any_failed


def test_one_image_and_odd_labels_can_be_drawn(tmp_path: Path) -> None:
    """Mathematics in a label is text; one value has no density; an id may hold anything."""
    store = RunStore(tmp_path / "run")
    entry = cell("x", model=r"$\frac{1$ ../..\ :*?", setting="c", gamma=0.27)
    store.write_cells([entry])
    write_rows(store, entry, image_rows(entry, r"$\a{", 15.0))
    write_pictures(store, entry, {r"$\a{": 15.0})
    summary = write_report([tmp_path / "run"], tmp_path / "out")
    strips = [path for path in summary.files if path.name.startswith("line_")]
    assert [path.parent for path in strips] == [tmp_path / "out" / "figures"]
    assert re.fullmatch(r"[A-Za-z0-9_.+-]+", file_name(only_line(tmp_path / "run")))


def test_pictures_are_clipped_and_grey_where_there_is_no_number() -> None:
    image = torch.tensor([math.nan, -1.0, 2.0, 0.25]).reshape(1, 2, 2)
    shown = picture(image)
    assert shown.shape == (2, 2, 3)
    assert shown[..., 0].ravel().tolist() == [0.5, 0.0, 1.0, 0.25]


# several runs -------------------------------------------------------------------------------------


def test_runs_are_concatenated(tmp_path: Path) -> None:
    first, second = small_run(tmp_path / "one"), small_run(tmp_path / "two", dtype="float64")
    write_report([second, first], tmp_path / "out")
    table = pd.read_csv(tmp_path / "out/table.csv")
    assert table["run"].tolist() == ["two", "one"] * 2
    assert table["line"].tolist() == [1, 2] * 2
    assert "| # | Run | Model |" in (tmp_path / "out/table.md").read_text()
    assert set(pd.read_csv(tmp_path / "out/samples.csv")["run"]) == {"one", "two"}


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [small_run(tmp_path / name / "run") for name in ("one", "two")]
    assert [line.run for line in load_runs(runs).lines] == [str(path) for path in runs]


# errors -------------------------------------------------------------------------------------------


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


def cells_of_no_list(tmp_path: Path) -> list[Path]:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/cells.json").write_text(json.dumps({"cells": "x"}))
    return [tmp_path / "run"]


def a_cell_that_lacks_its_attack(tmp_path: Path) -> list[Path]:
    entry = cell("x")
    del entry["attack"]
    RunStore(tmp_path / "run").write_cells([entry])
    return [tmp_path / "run"]


def broken_rows(tmp_path: Path) -> list[Path]:
    small_run(tmp_path / "run")
    RunStore(tmp_path / "run").rows_path("small", 0).write_bytes(b"PAR1 no more")
    return [tmp_path / "run"]


def rows_that_lack_a_column(tmp_path: Path) -> list[Path]:
    store = RunStore(small_run(tmp_path / "run"))
    store.write_rows("small", 0, store.read_rows("small").drop(columns="status"))
    return [tmp_path / "run"]


def an_image_twice(tmp_path: Path) -> list[Path]:
    store = RunStore(small_run(tmp_path / "run"))
    store.write_rows("small", 1, store.read_rows("small").head(3))
    return [tmp_path / "run"]


def an_unknown_status(tmp_path: Path) -> list[Path]:
    store = RunStore(small_run(tmp_path / "run"))
    store.write_rows("small", 0, store.read_rows("small").assign(status="fine"))
    return [tmp_path / "run"]


def an_unknown_paper_row(tmp_path: Path) -> list[Path]:
    paper = {"model": "DeiT-S+MPJ", "setting": "a"}
    return [small_run(tmp_path / "run", paper_row=paper)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: [], "Expected one run folder or more, none was given"),
        (lambda tmp_path: [tmp_path / "nowhere"], "does not exist. Give the folder"),
        (a_file, "is a file. Give the folder"),
        (no_run, "is not a run folder"),
        (twice, "is the same folder as .* Name it once"),
        (no_cells, "is an empty run: expected at least one cell"),
        (no_rows, r"is an empty run: expected rows of its 2 cell\(s\)"),
        (cells_of_no_list, "expected a list of cells"),
        (a_cell_that_lacks_its_attack, "lacks attack; expected run_id"),
        (broken_rows, "cannot be read .* Delete that folder"),
        (rows_that_lack_a_column, r"lack the column\(s\) status"),
        (an_image_twice, "holds image 'n00000000/photo 0.JPEG' twice for mse"),
        (an_unknown_status, "came 'fine'"),
        (an_unknown_paper_row, r"came model 'DeiT-S\+MPJ'.*Did you mean DeiT-S\+MJP a\?"),
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


def test_both_variants_have_all_five_scores(written: tuple[Path, ReportSummary]) -> None:
    for variant in ("paper", "standard"):
        table = frame(written[0], variant)
        assert (table[[f"{metric}_n" for metric in METRICS]].loc["plain"] == COUNT - 2).all()
