"""Everything a report says, computed once from the stored rows, and the files it is written into:
nothing here attacks or scores.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import pandas as pd

from mjp_privacy.core.drawing import Chart, standalone
from mjp_privacy.core.files import output_folder, sweep, working_in, write_atomically
from mjp_privacy.core.machine import one_thread
from mjp_privacy.core.progress import Progress
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import build_card, of_several
from mjp_privacy.report.card import HEADINGS, Card, card_notes, card_table, console_text
from mjp_privacy.report.clients import Client, attacked_ones, clients_of, derived_lines
from mjp_privacy.report.curves import (
    batch_points,
    batches_charts,
    curve_points,
    distribution_charts,
    uploads_charts,
)
from mjp_privacy.report.figures import Table, build_tables
from mjp_privacy.report.lines import Line
from mjp_privacy.report.notes import Section, all_notes, grouped, not_scored, unfinished
from mjp_privacy.report.page.page import render_page
from mjp_privacy.report.pictures import Gallery, fill_gallery, remove_listed, write_pictures
from mjp_privacy.report.runs import (
    Loaded,
    RunConfig,
    check_out,
    load_runs,
    nothing_in_the_way,
    run_configs,
)
from mjp_privacy.report.tables import comparisons
from mjp_privacy.report.tables.table5 import Row, table5, table5_csv, table5_rows
from mjp_privacy.report.tables.text import (
    TextTable,
    choices_csv,
    csv_text,
    latex,
    main_table,
    markdown,
    samples_csv,
    table_csv,
)
from mjp_privacy.report.tradeoff import clients_tradeoff
from mjp_privacy.report.worst_case import DerivedLine

CAPTION = (
    "Metrics in their standard variants; mean [95 % interval]; PSNR in dB, at most 100 in means. "
    "Grey: PSNR of a uniform grey. Rank ceiling: the limit of attacks that invert the patch "
    "embedding by minimum norm, beside these alone. Acc. altered: accuracy of the model with the "
    "block 0 that the attack needs."
)
CAPTION_PAPER = (
    "The same lines as the paper's scripts score them: images rounded to 8 bits, its FFT2D, "
    "zero-padded SSIM."
)

PictureChoice = Literal["shown", "all", "none"]

IDENTIFIED = 4  # lines whose pictures are looked up among all images


@dataclass(frozen=True)
class Contents:
    """A report before it is written; each part is made when it is first asked for."""

    runs: tuple[Path, ...]
    loaded: Loaded

    @property
    def lines(self) -> Sequence[Line]:
        return self.loaded.lines

    @cached_property
    def clients(self) -> list[Client]:
        """What was attacked, also where only controls were run."""
        return clients_of(self.lines)

    @cached_property
    def derived(self) -> list[DerivedLine]:
        """Worst cases and attacker's choices."""
        return derived_lines(self.clients)

    @cached_property
    def every_line(self) -> list[Line]:
        """The cells of all runs, then what is derived from them."""
        return [*self.lines, *self.derived]

    @cached_property
    def configs(self) -> list[RunConfig]:
        return run_configs(self.runs)

    @cached_property
    def card(self) -> Card:
        return of_several(build_card(self.clients), self.runs)

    @cached_property
    def strip(self) -> tuple[tuple[str, Line], ...] | None:
        """The lines behind the main figures of the card, under their headings: the columns of the
        card's pictures. None where the card has no client."""
        if not self.card.rows:
            return None
        row = self.card.rows[self.card.main]
        client = row.client
        if row.one_upload is None and row.any_uploads is None:
            return tuple((line.attack, line) for line in client.attacks if line.picture_ids)
        lines = (client.published, client.one_upload, client.any_uploads)
        columns = zip(HEADINGS.values(), lines, strict=False)
        return tuple((title, line) for title, line in columns if line is not None)

    @property
    def chooser(self) -> Line | None:
        """The line by whose PSNR pictures are chosen: the best with one upload, or the first."""
        by_heading = dict(self.strip or ())
        return by_heading.get(HEADINGS["one_upload"]) or next(iter(by_heading.values()), None)

    @cached_property
    def gallery(self) -> Gallery:
        """The pictures that the page has room for."""
        return fill_gallery(self.every_line, self.chooser)

    @cached_property
    def client_names(self) -> dict[int, str]:
        """What the report calls the client of each line, by the line's number."""
        of_client = ((client, (*client.lines, *client.derived)) for client in self.clients)
        return {line.number: client.title for client, lines in of_client for line in lines}

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """Every line in the paper's variants of the metrics, and in the standard ones."""
        return build_tables(self.lines, self.derived)

    @cached_property
    def points(self) -> pd.DataFrame:
        """PSNR against the number of uploads."""
        return curve_points(self.lines)

    @cached_property
    def batches(self) -> pd.DataFrame:
        """Exact pictures and PSNR against the batch."""
        return batch_points(self.lines)

    @cached_property
    def reasons(self) -> list[str]:
        """Why images or lines have no score."""
        return [*self.loaded.remarks, *not_scored(self.lines)]

    @cached_property
    def notes(self) -> tuple[Section, ...]:
        return all_notes(self.lines, self.derived, self.loaded.remarks)

    def main(self, *, folded: bool) -> TextTable:
        """Every line; without the folded ones if there are others: those in float64."""
        _, standard = self.tables
        frame = standard.frame
        single = frame[frame["dtype"] != "float64"]
        shown = frame if folded or single.empty else single
        left = len(frame) - len(shown)
        more = f" {left} lines in float64 are left out here." if left else ""
        table = replace(standard, frame=shown)
        many = self.loaded.many_runs
        return main_table(table, many_runs=many, caption=CAPTION + more, title="Every line")

    @cached_property
    def card_lines(self) -> list[tuple[str, Line]]:
        """The lines behind the card's figures, each with its client's name and its own."""
        attacked = attacked_ones(self.clients)
        on_card = [row.client for row in self.card.rows]
        shown = [client for client in attacked if client in on_card]
        named: dict[Line, str] = {}
        for client in shown or attacked:
            for line in (client.one_upload, client.any_uploads, client.published):
                if line is not None and len(line.images):
                    named.setdefault(line, f"{client.title}: {line.attack}")
        return [(name, line) for line, name in named.items()]

    @cached_property
    def charts(self) -> Mapping[str, tuple[Chart, ...]]:
        """The charts by section of the page; a section without any is left out."""
        charts = {
            "distributions": distribution_charts(self.card_lines),
            "uploads": uploads_charts(self.points),
            "batches": batches_charts(self.batches),
            "tradeoff": clients_tradeoff(self.clients),
        }
        return {name: of_section for name, of_section in charts.items() if of_section}

    @cached_property
    def comparisons(self) -> list[TextTable]:
        tables = (comparisons.clients_table(self.clients), comparisons.residual_table(self.clients))
        return [table for table in tables if table is not None]

    @cached_property
    def table5_rows(self) -> list[Row]:
        return table5_rows(self.clients)

    @cached_property
    def table5(self) -> TextTable | None:
        """The table as the paper prints it; None where the published attack was not run."""
        return table5(self.table5_rows)

    @property
    def table5_first(self) -> bool:
        """Whether a run is of the paper's table, which then stands right under the answer; other
        runs show their pictures first."""
        names = [name for run in self.runs for name in RunStore(run).experiments]
        return any(name.startswith("table5") for name in names)

    @cached_property
    def tests(self) -> TextTable | None:
        """Paired tests, image by image; None where nothing can be compared."""
        return comparisons.tests_table(self.clients)

    @cached_property
    def details(self) -> list[TextTable]:
        """What else was measured, whether pictures point to their own image, whether metrics agree,
        and the paper's variants; identification of the card's main client before others'."""
        many = self.loaded.many_runs
        title = "Every line, metrics as the paper defines them"
        in_paper, standard = self.tables
        paper = main_table(in_paper, many_runs=many, caption=CAPTION_PAPER, title=title)
        main = self.card.rows[self.card.main].client.title if self.card.rows else ""
        of_main = sorted(self.card_lines, key=lambda named: not named[0].startswith(f"{main}: "))
        tables = (
            comparisons.measured_table(standard),
            comparisons.identification_table(of_main[:IDENTIFIED]),
            comparisons.agreement_table(self.chooser) if self.chooser else None,
            paper,
        )
        return [table for table in tables if table is not None]


def read_contents(runs: Sequence[Path], progress: Progress | None = None) -> Contents:
    """The contents of a report of these run folders."""
    paths = tuple(Path(run) for run in runs)
    return Contents(paths, load_runs(paths, progress))


# files --------------------------------------------------------------------------------------------


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
    runs: Sequence[Path], out: Path, *, everything: bool = False, pictures: PictureChoice = "shown"
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
            downloads = [(name, text) for name, text in DOWNLOADS.items() if name in beside]
            downloads += [(n, "a chart of this page") for n in beside if n.endswith(".svg")]
            downloads += [(n, "the config, for mjp attack") for n in beside if n[:6] == "config"]
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
        _write_text(out / "table.md", markdown(answer, tables, sections)),
        _write_text(out / "table.tex", latex(tables, sections)),
    ]


def _write_data(contents: Contents, out: Path) -> list[Path]:
    """The files for programs, and the charts."""
    lines, many = contents.lines, contents.loaded.many_runs
    texts = {"table.csv": table_csv(contents.tables, many_runs=many)}
    if contents.table5 is not None:
        texts["table5.md"] = markdown(contents.card.verdict, [contents.table5], [])
        texts["table5.tex"] = latex([contents.table5], [])
        texts["table5.csv"] = table5_csv(contents.table5_rows)
    texts |= {config.file: config.text for config in contents.configs if config.fields}
    for name, table in (("rounds.csv", contents.points), ("batches.csv", contents.batches)):
        texts |= {name: csv_text(table)} if len(table) else {}
    charts = [chart for section in contents.charts.values() for chart in section]
    texts |= {f"figures/{chart.name}.svg": standalone(chart.svg) for chart in charts}
    if sum(len(line.images) * len(line.keys) for line in lines) <= MOST_ROWS:
        texts["samples.csv"] = samples_csv(lines, many_runs=many)
    if contents.derived:
        texts["choices.csv"] = choices_csv(contents.derived)
    return [_write_text(out / name, text) for name, text in texts.items()]


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
