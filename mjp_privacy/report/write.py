"""Turn stored rows into a page, tables and pictures. Nothing here attacks or scores.

OUT/index.html                 the whole report on one page that works offline
OUT/table.md  table.tex        the same answer and tables in two formats
OUT/table.csv                  the figures at full precision, for both metric variants
OUT/table5.md .tex .csv        the paper's Table 5 of these runs: its rows, columns and digits
OUT/samples.csv                every stored row; not of a large run, whose parquet files have them
OUT/choices.csv                which attack the worst case took for each image
OUT/rounds.csv                 PSNR against the number of uploads
OUT/batches.csv                exact pictures and PSNR against the batch
OUT/config.yaml                the run's config (config_1.yaml, … if several), for `mjp attack`
OUT/figures/                   the page's charts
OUT/pictures/                  reconstructions as files, which `mjp score` can score

choices.csv is written only if some target met several attacks, rounds.csv only if an attack was run
with several numbers of uploads, batches.csv only if clients were that differ in their batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mjp_privacy.core.drawing import standalone
from mjp_privacy.core.files import output_folder, sweep, working_in, write_atomically
from mjp_privacy.core.machine import one_thread
from mjp_privacy.core.progress import Progress
from mjp_privacy.report.card import card_notes, card_table, console_text
from mjp_privacy.report.contents import Contents, read_contents
from mjp_privacy.report.notes import Section, grouped, unfinished
from mjp_privacy.report.page.page import render_page
from mjp_privacy.report.pictures import remove_listed, write_pictures
from mjp_privacy.report.runs import check_out, nothing_in_the_way
from mjp_privacy.report.tables import text
from mjp_privacy.report.tables.table5 import table5_csv


@dataclass(frozen=True)
class ReportSummary:
    """What was written, and what to print."""

    contents: Contents
    files: tuple[Path, ...]  # the page first

    @property
    def console(self) -> str:
        """The answer, and what was not scored."""
        return console_text(self.contents.card, self.contents.reasons)

    @property
    def not_run(self) -> int:
        """Images that a killed run still owes, over all lines."""
        return sum(line.not_run for line in self.contents.lines)

    @property
    def made_nothing(self) -> bool:
        """Whether the runs are done, no attack gave a picture, and some failed."""
        attacks = [line for line in self.contents.lines if line.cell.role == "attack"]
        failed = any(line.failed_images or line.unreadable for line in attacks)
        return failed and not self.not_run and not any(line.reconstructs for line in attacks)

    @property
    def damaged(self) -> int:
        """Files whose rows are in no figure."""
        return sum(len(line.left_out) for line in self.contents.lines)


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    everything: bool = False,
    pictures: Literal["shown", "all", "none"] = "shown",
) -> ReportSummary:
    """Write every file of the report of one run or several into `out`.

    everything   every line, note and diagnostic in Markdown and LaTeX, not the answer alone
    pictures     which reconstructions become files: those on the page (of float64 lines only if
                 there are no others), all, or none
    """
    check_out(out, runs)
    with one_thread(), Progress("reading rows", None, "cells", plain=False) as progress:
        contents = read_contents(runs, progress)
        progress.total = 12 * len(contents.lines)  # all that follows, as long as that takes

        def then(what: str, weight: int) -> None:
            progress.advance(weight * len(contents.lines), what)

        then("choosing pictures", 0)
        _ = contents.gallery
        then("tables", 2)
        _ = contents.tables  # what is wrong with a run is said before anything is written
        with nothing_in_the_way(out), working_in(output_folder(out)):
            sweep(out)
            files = _write_texts(contents, out, everything=everything)
            then("rows and charts", 1)
            files += _write_data(contents, out)
            then("pictures", 2)
            if pictures == "none":
                remove_listed(out / "pictures")
            else:
                files += _write_pictures(contents, out, every=pictures == "all")
            then("page", 2)
            beside = [path.relative_to(out).as_posix() for path in files]
            downloads = [(name, what) for name, what in DOWNLOADS.items() if name in beside]
            downloads += [(n, "a chart of this page") for n in beside if n.endswith(".svg")]
            configs = [name for name in beside if name.startswith("config")]
            downloads += [(name, "the config, for mjp attack") for name in configs]
            files.insert(0, _write_text(out / "index.html", render_page(contents, downloads)))
            for name in MADE:
                for stale in {*out.glob(name)} - {*files}:
                    stale.unlink()
    return ReportSummary(contents, tuple(files))


DOWNLOADS = {
    "table.md": "the answer and the tables in Markdown",
    "table.tex": "the same in LaTeX",
    "table.csv": "every line at full precision, both variants of the metrics",
    "table5.md": "the paper's Table 5 of these runs in Markdown",
    "table5.tex": "the same in LaTeX",
    "table5.csv": "the same at full precision, with intervals and the paper's figures",
    "samples.csv": "every stored row: image, metric, value, status, reason",
    "choices.csv": "which attack the worst case took for each image",
    "rounds.csv": "PSNR against the number of uploads",
    "batches.csv": "exact pictures and PSNR against the batch",
    "pictures/index.csv": "reconstructions as PNG files, listed",
}

MOST_ROWS = 200_000
"""Rows up to which they are written as CSV: 70 MB. Parquet files have more (docs/running.md)."""

MADE = (
    *(name for name in DOWNLOADS if not name.startswith("pictures/")),
    *(f"figures/{name}.svg" for name in ("success", "lpips", "ssim", "spread", "tradeoff")),
    *("figures/uploads_*.svg", "figures/batches_*.svg", "figures/strip.png", "samples.txt"),
)
"""Names that a report gives to files, or gave: what an earlier one left is deleted."""


def _write_texts(contents: Contents, out: Path, *, everything: bool) -> list[Path]:
    """table.md and table.tex: the card, the clients and the lines; on request all else too."""
    card = contents.card
    first = [contents.table5] if contents.table5 else []
    tables = [card_table(card), *first, *contents.comparisons, contents.main(folded=everything)]
    tables += contents.details if everything else []
    under = Section("Under which assumptions", card_notes(card))
    owed = grouped(contents.lines, unfinished)
    missing = Section("Images and lines without a score", (*owed, *contents.reasons))
    more = "Diagnostics, float64 lines and further notes: index.html, or mjp report --all."
    notes = contents.notes if everything else (missing, Section("More", (more,)))
    sections = [section for section in (under, *notes) if section.items]
    answer = " ".join(filter(None, (card.verdict, card.assumptions, card.beside)))
    return [
        _write_text(out / "table.md", text.markdown(answer, tables, sections)),
        _write_text(out / "table.tex", text.latex(tables, sections)),
    ]


def _write_data(contents: Contents, out: Path) -> list[Path]:
    """The files for programs, and the charts."""
    lines, many = contents.lines, contents.loaded.many_runs
    texts = {"table.csv": text.table_csv(contents.tables, many_runs=many)}
    if contents.table5 is not None:
        texts["table5.md"] = text.markdown(contents.card.verdict, [contents.table5], [])
        texts["table5.tex"] = text.latex([contents.table5], [])
        texts["table5.csv"] = table5_csv(contents.table5_rows)
    texts |= {config.file: config.text for config in contents.configs if config.fields}
    for name, table in (("rounds.csv", contents.points), ("batches.csv", contents.batches)):
        texts |= {name: text.csv_text(table)} if len(table) else {}
    charts = [chart for section in contents.charts.values() for chart in section]
    texts |= {f"figures/{chart.name}.svg": standalone(chart.svg) for chart in charts}
    if sum(len(line.images) * len(line.keys) for line in lines) <= MOST_ROWS:
        texts["samples.csv"] = text.samples_csv(lines, many_runs=many)
    if contents.derived:
        texts["choices.csv"] = text.choices_csv(contents.derived)
    return [_write_text(out / name, content) for name, content in texts.items()]


def _write_text(path: Path, content: str) -> Path:
    data = content.encode("utf-8", "backslashreplace")  # text mode would translate line ends
    write_atomically(path, lambda temporary: temporary.write_bytes(data))
    return path


def _write_pictures(contents: Contents, out: Path, *, every: bool) -> list[Path]:
    """The reconstructions, every one or those on the page; the index that lists them."""
    single = [line for line in contents.lines if line.cell.dtype != "float64"]
    written = write_pictures(
        contents.lines if every else single or contents.lines,
        [shown.image_id for shown in contents.gallery.shown],
        out / "pictures",
        all_images=every,
        client_names=contents.client_names,
    )
    return written[-1:]
