"""What a report prints: the answer in ten lines, and what was not scored."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from mjp_privacy.core.text import counted, cut
from mjp_privacy.report.card import PLAIN_TO_SEE, SUPERSCRIPTS, Card, CardRow
from mjp_privacy.report.tables.text import capped, one_line

WIDTH = 120

LINES = 9
"""Lines of the answer at most; one more says where the page is."""

LONGEST = 80
"""Letters of a client's name, the middle of longer ones is left out."""

REASONS_SHOWN = 4
"""Reasons of missing scores that are printed."""

SHORT_HEADINGS = {
    "published": "APRIL as published",
    "one_upload": "best, one upload",
    "any_uploads": "best, several",
    "floor": "no gradient",
}


def console_text(card: Card, reasons: Sequence[str]) -> str:
    """The answer and the commonest reasons of missing scores, as `notes.not_scored` makes them."""
    more = len(reasons) - REASONS_SHOWN
    tail = [f"and {more} further reasons: see the page"] if more > 0 else []
    said = [_cut(one_line(reason)) for reason in (*reasons[:REASONS_SHOWN], *tail)]
    return "\n".join([console_card(card), *said, *([""] if said else [])])


def _cut(reason: str) -> str:
    """A reason on one line, cut between words; the lines it holds for stay at its end."""
    if len(reason) <= WIDTH:
        return reason
    text, bracket, lines = reason.rpartition(" (lines ")
    end = f"{bracket}{lines}" if len(lines) < WIDTH / 4 else ""
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
    of = f" of {figure.of}" if counted else ""
    reached = "all" if figure.above_20 == figure.of else figure.above_20
    said = f"{figure.exact}{of} exact, {reached} ≥ {PLAIN_TO_SEE} dB"
    if figure.exact == figure.of:
        said = f"all{of} exact"
    elif not figure.above_20:
        said = f"none{of}, mean {capped(figure.mean, 1)} dB"
    return said + card.numbers(figure)


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


def _render(content: Any) -> str:
    out = io.StringIO()
    # no colours and a fixed width, so that the same rows print the same text everywhere
    Console(file=out, width=WIDTH, color_system=None, legacy_windows=False).print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
