"""What a report prints: the answer in ten lines, what was not scored, and on request every line."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from mjp_privacy.core.text import counted, cut
from mjp_privacy.report.card import PLAIN_TO_SEE, SUPERSCRIPTS, Card, CardFigure, CardRow
from mjp_privacy.report.figures import Table
from mjp_privacy.report.tables.text import (
    DASH,
    Record,
    attack,
    capped,
    gamma,
    number,
    one_line,
    percent,
    records,
    remark,
    title_of,
)
from mjp_privacy.report.worst_case import RULES

WIDTH = 120

LINES = 9
"""Lines of the answer at most; one more says where the page is."""

LONGEST = 80
"""Letters of a client's name, the middle of longer ones is left out."""

REASONS_SHOWN = 4
"""Reasons of missing scores that are printed without `--all`."""

LINES_SHOWN = 30
"""Letters of the numbers of lines that a reason which is cut keeps."""

SHORT_HEADINGS = {
    "published": "APRIL as published",
    "one_upload": "best, one upload",
    "any_uploads": "best, several",
    "floor": "no gradient",
}

COLUMNS = (
    *("#", "Model", "Set", "γ", "Attack", "dtype", "n", "fail", "PSNR", "exact", "≥20", "grey"),
    *("SSIM", "LPIPS", "Acc"),
)
_LEFT = ("Model", "Set", "Attack", "dtype")
_MAY_WRAP = ("Model", "Attack")


def console_text(card: Card, reasons: Sequence[str], table: Table | None = None) -> str:
    """The answer, the commonest reasons of missing scores, and the lines of `table` if given.

    reasons  sentences as `notes.not_scored` makes them
    """
    shown = reasons if table is not None else reasons[:REASONS_SHOWN]
    parts = [console_card(card)]
    if shown:
        more = len(reasons) - len(shown)
        tail = [f"and {more} further reasons: see the page"] if more else []
        said = [_cut(one_line(reason)) for reason in (*shown, *tail)]
        parts.append("\n".join(said) + "\n")
    if table is not None:
        parts.append(console_table(table, many_runs=table.frame["run"].nunique() > 1))
    return "\n".join(parts)


def _cut(reason: str) -> str:
    """A reason on one line, cut between words; the lines it holds for stay at its end."""
    if len(reason) <= WIDTH:
        return reason
    text, bracket, lines = reason.rpartition(" (lines ")
    end = f"{bracket}{lines}" if len(lines) < LINES_SHOWN else ""
    return textwrap.shorten(text if end else reason, WIDTH - len(end), placeholder=" …") + end


# the answer ---------------------------------------------------------------------------------------


def console_card(card: Card) -> str:
    """The verdict, the assumptions, a line for each client, and the footnotes by number."""
    said = _wrapped(card.verdict, 2) + _wrapped(card.assumptions or card.beside, 3)
    if not any(figure and figure.n for row in card.rows for figure in row.figures.values()):
        return "\n".join(said + _wrapped(card.beside, LINES) * bool(card.assumptions)) + "\n"
    kept = [card.main, *(p for p, row in enumerate(card.rows) if not row.defended)][:2]
    order = list(dict.fromkeys([*kept, *range(len(card.rows))]))
    for count in range(len(order), 0, -1):
        rows = [card.rows[place] for place in sorted(order[:count])]
        left = card.further + len(card.rows) - count
        lines = [*said, *_table(card, rows), *_footnotes(card, rows, left)]
        if len(lines) <= LINES or count <= len(set(kept)):
            break
    return "\n".join(lines) + "\n"


def _wrapped(text: str, most: int) -> list[str]:
    return textwrap.wrap(
        one_line(text), WIDTH, max_lines=most, placeholder=" …", break_on_hyphens=False
    )


def _table(card: Card, rows: Sequence[CardRow]) -> list[str]:
    """Aligned columns of words; a client's name that has no room goes on in the next line."""
    table = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    given = {f.of for row in rows for c, f in row.figures.items() if f and c != "floor"}
    every = given.pop() if len(given) == 1 else None
    pictures = "" if every is None else f" ({counted(every, 'picture')} each)"
    table.add_column(f"Client{pictures}", overflow="fold")
    columns = [column for column in SHORT_HEADINGS if column in card.columns]
    for column in columns:
        table.add_column(SHORT_HEADINGS[column], no_wrap=True, overflow="fold")
    for row in rows:
        name = cut(one_line(row.client), LONGEST) + card.numbers(row)
        cells = [_cell(card, row, column, counted=every is None) for column in columns]
        table.add_row(*map(Text, (name, *cells)))
    return _render(table).splitlines()


def _cell(card: Card, row: CardRow, column: str, *, counted: bool) -> str:
    """`5 exact, 17 ≥ 20 dB`; the mean where no picture is that good."""
    figure = row.figures[column]
    if figure is None or math.isnan(figure.mean):
        return row.absent_of(column)
    if column == "floor":
        return f"{capped(figure.mean, 1)} dB"
    return _short_counts(figure, counted=counted) + card.numbers(figure)


def _short_counts(figure: CardFigure, *, counted: bool) -> str:
    of = f" of {figure.of}" if counted else ""
    if figure.exact == figure.of:
        return f"all{of} exact"
    if not figure.above_20:
        return f"none{of}, mean {capped(figure.mean, 1)} dB"
    reached = "all" if figure.above_20 == figure.of else figure.above_20
    return f"{figure.exact}{of} exact, {reached} ≥ {PLAIN_TO_SEE} dB"


def _footnotes(card: Card, rows: Sequence[CardRow], left: int) -> list[str]:
    """The names of the rows' flags by their numbers, and how many clients are on the page alone."""
    keys = {flag.key for row in rows for flag in row.every_flag}
    names = [
        f"{str(place).translate(SUPERSCRIPTS)} {flag.words}"
        for place, flag in enumerate(card.flags, 1)
        if flag.key in keys
    ]
    further = f"{counted(left, 'further client')} on the page" if left else ""
    return _wrapped(". ".join(filter(None, ("; ".join(names), further))), 2)


# every line ---------------------------------------------------------------------------------------


def console_table(table: Table, *, many_runs: bool) -> str:
    """The main columns of `table`; below it, why lines have no score."""
    rich_table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in (*(["Run"] if many_runs else []), *COLUMNS):
        left = title in _LEFT or title == "Run"
        wraps = title in _MAY_WRAP or title == "Run"
        rich_table.add_column(
            title, justify="left" if left else "right", no_wrap=not wraps, overflow="fold"
        )
    rows = records(table)
    first_reduction = next((row for row in rows if row["role"] in RULES), None)
    for row in rows:
        if row is first_reduction:
            rich_table.add_section()
        run = [str(row["run"])] if many_runs else []
        rich_table.add_row(*(Text(one_line(cell)) for cell in (*run, *_cells(row))))
    text = _render(rich_table) + _legend(table.varying)
    reasons = [f"line {row['line']}: {remark(row)}" for row in rows if remark(row)]
    said = (_render(Text(one_line(reason))).rstrip() for reason in reasons)
    return "\n".join([text, *said]) + "\n"


def _render(content: Any) -> str:
    out = io.StringIO()
    # no colours and a fixed width, so that the same rows print the same text everywhere
    Console(file=out, width=WIDTH, color_system=None, legacy_windows=False).print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _legend(varying: Sequence[str]) -> str:
    further = (
        f" The lines also differ in {', '.join(map(title_of, varying))}; see table.md."
        if varying
        else ""
    )
    legend = (
        "PSNR: standard variant, mean ± half its 95 % interval, in dB, each picture counted as at "
        "most 100; exact: equal in every 8-bit value; ≥20: pictures at 20 dB or more; grey: PSNR "
        f"of a uniform grey; fail: number of images that failed or were not run.{further}"
    )
    return _render(Text(legend)).rstrip()


def _cells(record: Record) -> list[str]:
    half = (record["psnr_hi"] - record["psnr_lo"]) / 2
    psnr = capped(record["psnr_mean"], 2)
    missing = record["n_failed"] + record["n_unsupported"] + record["n_unscored"]
    failed = record["n_failed"] + record["n_not_run"]
    cell_failed = record["status"] != "ok" and not missing
    return [
        *(str(record["line"]), str(record["model"]), str(record["setting"])),
        *(gamma(record["gamma"]), attack(record)),
        str(record["dtype"]).replace("float", "f"),
        *(
            str(record["n"]),
            record["status"][:6] if cell_failed else str(failed),
        ),
        psnr if psnr == DASH or math.isnan(half) or half == 0 else f"{psnr} ±{half:.2f}",
        *((str(record["psnr_exact"]), str(record["psnr_at_20"])) if record["n"] else "––"),
        number(record["grey_mean"], 1),
        *(_short(record["ssim_mean"]), _short(record["lpips_mean"])),
        percent(record["acc_mean"], record["acc_n"]),
    ]


def _short(value: float) -> str:
    return "<.001" if 0 < value < 0.0005 else number(value, 3)
