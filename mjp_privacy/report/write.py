"""The files of a report: the page, tables in Markdown, LaTeX and CSV, charts and pictures. Nothing
here attacks or scores.

The page, index.html, holds everything; it opens offline and asks no server for anything. Its
templates ask the report's `Contents` themselves; here is what they ask it with.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from markupsafe import Markup

from mjp_privacy.core.files import output_folder, sweep, working_in, write_atomically
from mjp_privacy.core.machine import one_thread
from mjp_privacy.core.progress import Progress
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report import text
from mjp_privacy.report.card import card_notes, card_table, console_text
from mjp_privacy.report.clients import images_of
from mjp_privacy.report.contents import Contents, read_contents
from mjp_privacy.report.figures import TITLES
from mjp_privacy.report.notes import Section
from mjp_privacy.report.pictures import picture_score, remove_listed, write_pictures
from mjp_privacy.report.runs import check_out, commands, provenance
from mjp_privacy.report.table5 import table5_csv
from mjp_privacy.report.text import DASH, DECIMALS, capped, number, percent

if TYPE_CHECKING:
    from jinja2 import Environment


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
    def damaged(self) -> Sequence[str]:
        """Files whose rows are in no figure, and lists of cells that are damaged or missing."""
        return self.contents.loaded.damaged


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    pictures: Literal["shown", "all", "none"] = "shown",
) -> ReportSummary:
    """Write every file of the report of one run or several into `out`.

    pictures   which reconstructions become files: those on the page, all, or none
    """
    check_out(out, runs, OWN)
    with one_thread(), Progress("reading rows", None, "cells", plain=False) as progress:
        contents = read_contents(runs, progress)
        progress.advance(0, "choosing pictures")
        _ = contents.gallery
        progress.advance(0, "tables")
        _ = contents.tables, contents.table5  # what is wrong is said before anything is written
        with working_in(output_folder(out)):
            sweep(out)
            files = _write_texts(contents, out)
            progress.advance(0, "rows and charts")
            files += _write_data(contents, out)
            progress.advance(0, "pictures")
            if pictures == "none":
                remove_listed(out / "pictures")
            else:
                made = write_pictures(
                    contents.lines,
                    [shown.image_id for shown in contents.gallery.shown],
                    out / "pictures",
                    all_images=pictures == "all",
                    client_names=contents.client_names,
                )
                files += made[-1:]  # the index that lists them
            progress.advance(0, "page")
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
    "table.tex": "its tables in LaTeX",
    "table.csv": "every line at full precision, both variants of the metrics",
    "table5.md": "the paper's Table 5 of these runs in Markdown",
    "table5.tex": "the same in LaTeX",
    "table5.csv": "the same at full precision, with intervals and the paper's figures",
    "samples.csv": "every stored row: image, status, reason, every metric",
    "rounds.csv": "PSNR against the number of uploads",
    "batches.csv": "exact pictures and PSNR against the batch",
    "pictures/index.csv": "reconstructions as PNG files, listed",
}

MOST_ROWS = 200_000
"""Rows up to which they are written as CSV: 70 MB. Parquet files have more (docs/running.md)."""

MADE = (
    *(name for name in DOWNLOADS if not name.startswith("pictures/")),
    *("figures/success.svg", "figures/tradeoff.svg", "figures/uploads_*.svg"),
    *("figures/batches_*.svg", "config.yaml", "config_*.yaml"),
    "choices.csv",  # of earlier versions
)
"""Names that a report gives to files: what an earlier one left is deleted."""

OWN = ("index.html", "pictures", "figures", *MADE)
"""All that lies in a report's folder."""


def _write_texts(contents: Contents, out: Path) -> list[Path]:
    """table.md: the tables and notes of the page; table.tex: its tables."""
    card = contents.card
    first = [contents.table5] if contents.table5 else []
    tables = [card_table(card), *first, *contents.comparisons, contents.main]
    tables += [contents.tests] if contents.tests else []
    tables += contents.details
    under = Section("Under which assumptions", card_notes(card))
    sections = [section for section in (under, *contents.notes) if section.items]
    answer = " ".join(filter(None, (card.verdict, card.assumptions, card.beside)))
    return [
        _write_text(out / "table.md", text.markdown(answer, tables, sections)),
        _write_text(out / "table.tex", text.latex(tables)),
    ]


def _write_data(contents: Contents, out: Path) -> list[Path]:
    """The files for programs, and the charts."""
    lines, many = contents.lines, contents.loaded.many_runs
    texts = {"table.csv": text.table_csv(contents.tables, many_runs=many)}
    if contents.table5 is not None:
        texts["table5.md"] = text.markdown(contents.card.verdict, [contents.table5], [])
        texts["table5.tex"] = text.latex([contents.table5])
        texts["table5.csv"] = table5_csv(contents.table5_rows)
    texts |= {config.file: config.text for config in contents.configs if config.fields}
    for name, table in (("rounds.csv", contents.points), ("batches.csv", contents.batches)):
        texts |= {name: text.csv_text(table)} if len(table) else {}
    charts = [chart for section in contents.charts.values() for chart in section]
    texts |= {f"figures/{chart.name}.svg": chart.svg for chart in charts}
    if sum(len(line.images) * len(line.keys) for line in lines) <= MOST_ROWS:
        texts["samples.csv"] = text.samples_csv(lines, many_runs=many)
    return [_write_text(out / name, content) for name, content in texts.items()]


def _write_text(path: Path, content: str) -> Path:
    data = content.encode("utf-8", "backslashreplace")  # text mode would translate line ends
    write_atomically(path, lambda temporary: temporary.write_bytes(data))
    return path


# the page -----------------------------------------------------------------------------------------

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'sha256-{}'; base-uri 'none'; form-action 'none'"
)
"""No request may leave the page, and no script runs but the one that is its own, by its digest."""

_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that turn what follows: "a\\u202egpj.png" would be read as agnp.jpg."""


def render_page(contents: Contents, downloads: Sequence[tuple[str, str]] = ()) -> str:
    """The whole page as text, with everything that came from a run escaped.

    downloads   the files beside the page, and what they hold
    """
    script = _asset("page.js")
    template = _environment().get_template("page.html.j2")
    page = template.render(
        title=text.HEADING,
        contents=contents,
        card=contents.card,
        gallery=contents.gallery,
        images=images_of(contents.lines),
        downloads=downloads,
        provenance=provenance(contents.configs, contents.lines),
        commands=commands(contents.configs, contents.lines),
        style=_asset("page.css"),
        script=script,
        policy=POLICY.format(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        data=page_data(contents),
    )
    return _DIRECTIONS.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", page)


def _asset(name: str) -> str:
    return (files("mjp_privacy.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    """The templates, with what they write texts and numbers by."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("mjp_privacy.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"number": number, "link": link, "figure": figure}
    found.filters["percent"] = percent
    found.globals |= {"DASH": DASH, "CAP": PSNR_CAP, "share": share}
    found.globals["picture_score"] = picture_score
    return found


# what templates write by --------------------------------------------------------------------------


def figure(cell: str) -> Markup:
    """A cell of a table, what stands in brackets beneath its figure: `71.7 [66.9, 76.3]`."""
    mean, bracket, interval = cell.partition(" [" if " [" in cell else " (")
    if not (bracket and mean[:1].isdigit() and cell[-1] in "])"):
        return Markup.escape(cell)
    return Markup("{}<small>{}{}</small>").format(mean, bracket.strip(), interval)


def share(count: int, of: int) -> str:
    """The length of a bar: `58.00%` for 116 of 200."""
    return f"{100 * count / of:.2f}%" if of else "0%"


def link(text: str, safe: str = "/") -> str:
    """A name as part of an address; it cannot name another protocol, as `:` is escaped."""
    return quote(text, safe=safe, errors="replace")


# what the page's script reads ---------------------------------------------------------------------

SCORES = {
    **dict.fromkeys(("psnr", "ssim", "lpips", "mse", "fft2d"), "standard"),
    "gradient_residual": "diagnostic",
}
"""The scores that pictures have, in the page's order, and the variant of each."""

DIGITS = 6  # significant ones of a per-image score


def page_data(contents: Contents) -> str:
    """The text of `<script type="application/json">`: the pictures that the page holds and their
    scores, in ASCII and without the `<`, `>` and `&` that would end it."""
    gallery = contents.gallery
    images = sorted(shown.image_id for shown in gallery.shown)
    lines: list[dict[str, Any]] = []
    for line in contents.every_line:
        client, exact = contents.client_names[line.number], line.exact_images
        scores = {
            metric: list(map(_plain, line.scored(metric, variant).reindex(images)))
            for metric, variant in SCORES.items()
            if line.count(metric, variant)
        }
        of_line: dict[str, Any] = {"number": line.number, "attack": line.title, "client": client}
        run = [line.run] if contents.loaded.many_runs else []
        of_line |= {"name": " · ".join([f"{line.number}", *run, client, line.title])}
        of_line["setting"] = line.cell.setting
        of_line |= {"scores": scores, "exact": [int(image in exact) for image in images]}
        lines.append(of_line)
    data = json.dumps(
        {
            **{"cap": PSNR_CAP, "at_cap": capped(PSNR_CAP, 1)},
            "metrics": [
                {"name": name, "title": TITLES.get(name, name.replace("_", " "))}
                | {"decimals": DECIMALS.get(name, 4)}
                for name in SCORES
                if any(name in line["scores"] for line in lines)
            ],
            **{"lines": lines, "image_ids": images},
            "shown": [{"image_id": x.image_id, "lines": [*x.lines.items()]} for x in gallery.shown],
            "pictures": [*gallery.pictures.items()],
        },
        allow_nan=False,
        separators=(",", ":"),
    )
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: float) -> float | str | None:
    """JSON knows neither NaN nor infinity."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"  # as JavaScript reads it
    return float(f"{value:.{DIGITS}g}")
