"""The privacy card as text: the first lines of the console, and the top of table.md."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.card.chosen_clients import card_clients
from mjp_privacy.report.card.clients import clients_of
from mjp_privacy.report.card.content import Card, CardFigure, CardRow
from mjp_privacy.report.card.facts import facts, not_tried, would_change
from mjp_privacy.report.card.rows import card_rows
from mjp_privacy.report.card.sentence import beside, main_row, sentence, verdict
from mjp_privacy.report.pictures.pixels import one_line, shorten
from mjp_privacy.report.tables.text import DASH, TextTable, below_cap, number
from mjp_privacy.report.worst_case import Group

WIDTH = 120
LINES = 12
SENTENCES, VERDICT, LEGEND = 5, 2, 2
"""Lines of the console that the card's sentences, the first of them, and the names of its flags
take at most."""

HEADINGS = ("APRIL as published", "best, one upload", "best, several uploads", "floor")

CAPTION = (
    "PSNR in dB (standard, against the picture that the setting asks for), mean [95 % interval] of "
    "min(PSNR, 100); exact: pictures equal to the original in every 8-bit value; ≥ 20: pictures at "
    "20 dB or more, where their content is plain to see. Best: for each picture the best attack, "
    "chosen with the private picture at hand: an upper bound for any one attacker. Floor: the "
    "best picture that needs no gradient. Letters are explained below."
)


def build_card(groups: Sequence[Group]) -> Card:
    """The card of a report; `groups` as `reduced_groups` makes them."""
    clients, further = card_clients(groups)
    rows = card_rows(clients, groups)
    if not rows:
        nobody = "No client was attacked: there are no rows of an attack."
        return Card(nobody, "", (), 0, (), (), ())
    main = main_row(clients, rows)
    return Card(
        verdict=verdict(clients, rows),
        sentence=sentence(clients, rows),
        beside=beside(clients, rows),
        rows=rows,
        further=further,
        facts=facts(clients[main], rows[main]),
        not_tried=not_tried(clients_of(groups), clients[main]),
        would_change=would_change(clients[main], rows[main]),
        main=main,
    )


def figures_of(row: CardRow) -> tuple[CardFigure | None, ...]:
    """The figures of a row in the order of `HEADINGS`."""
    return row.published, row.one_upload, row.any_uploads, row.floor


def interval_text(figure: CardFigure | None, *, places: int | None = 1) -> str:
    """`71.7 [66.9, 76.3]` with the marks of its flags; a dash where there is no figure.

    places: decimals of the interval; None leaves it out
    """
    if figure is None or math.isnan(figure.mean):
        return DASH
    marks = "".join(flag.mark for flag in figure.flags)
    known = places is not None and not math.isnan(figure.low)
    bounds = f" [{figure.low:.{places}f}, {figure.high:.{places}f}]" if known else ""
    mean = "100 (cap)" if figure.mean >= PSNR_CAP else f"{below_cap(figure.mean, 1)}{bounds}"
    over = f" over {figure.n}" if figure.n != figure.of else ""
    return mean + over + (f" {marks}" if marks else "")


def counts_text(figure: CardFigure | None) -> str:
    """`116 exact, 188 ≥ 20 of 200`; empty where there is no figure."""
    if figure is None or math.isnan(figure.mean):
        return ""
    return f"{figure.exact} exact, {figure.above_20} ≥ 20 of {figure.of}"


# console ------------------------------------------------------------------------------------------


def console_card(card: Card) -> str:
    """The card in at most twelve lines: the sentence, a line for each client, the flags."""
    said = one_line(f"{card.sentence} {card.beside}".strip())
    lines = textwrap.wrap(one_line(card.verdict), WIDTH, max_lines=VERDICT, placeholder=" …")
    left = SENTENCES - len(lines)
    lines += textwrap.wrap(said, WIDTH, max_lines=left, placeholder=" …")
    names = "; ".join(f"{flag.mark} {flag.name}" for flag in card.flags)
    legend = textwrap.wrap(names, WIDTH)[:LEGEND]
    room = LINES - len(lines) - len(legend) - 2
    shown = _console_rows(card, room)
    if card.further or len(shown) < len(card.rows):
        shown = _console_rows(card, room - 1)
    if shown:
        lines += ["", *_console_table(shown)]
    lines += legend
    left = card.further + (len(card.rows) - len(shown) if shown else 0)
    if left:
        lines.append(f"{left} further client{'s' if left > 1 else ''}: see the page.")
    return "\n".join(lines) + "\n"


def _console_rows(card: Card, room: int) -> list[CardRow]:
    """As many rows as there is room for, none without truth: the one the sentence is about, one of
    an undefended client, then those with a matching attack."""
    if not any(figure and figure.n for row in card.rows for figure in figures_of(row)):
        return []
    places = range(len(card.rows))
    undefended = [place for place in places if not card.rows[place].defended][:1]
    matched = [p for p in places if card.rows[p].one_upload or card.rows[p].any_uploads]
    wanted = dict.fromkeys([card.main, *undefended, *matched, *places])
    return [card.rows[place] for place in sorted([*wanted][: max(2, room)])]


def _console_table(rows: Sequence[CardRow]) -> list[str]:
    """Aligned columns; where they are wider than the console, intervals lose their decimals, or
    are left to the tables, and clients' names are cut."""
    given = {figure.of for row in rows for figure in figures_of(row)[:3] if figure}
    every = f" of {given.pop()}" if len(given) == 1 else ""
    for places in (1, 0, None):
        head = f"dB{'' if places is None else ' [95 %]'}, exact|≥20{every}"
        cells = [_console_cells(row, counted=not every, places=places) for row in rows]
        columns = zip(HEADINGS, *cells, strict=True)
        widths = [max(map(len, column)) for column in columns]
        room = WIDTH - sum(widths) - 2 * len(widths)
        if room >= len(head):
            break
    names = [head, *(_client_text(row, max(room, len(head))) for row in rows)]
    first = max(map(len, names))
    lines = []
    for name, texts in zip(names, [HEADINGS, *cells], strict=True):
        padded = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        lines.append(shorten("  ".join([name.ljust(first), *padded]).rstrip(), WIDTH))
    return lines


def _client_text(row: CardRow, room: int) -> str:
    marks = "".join(flag.mark for flag in row.flags)
    return shorten(one_line(row.client), room - len(marks) - bool(marks)) + (
        f" {marks}" if marks else ""
    )


def _console_cells(row: CardRow, *, counted: bool, places: int | None) -> list[str]:
    *attacks, floor = figures_of(row)
    cells = []
    for figure in attacks:
        text = interval_text(figure, places=places)
        of = f" of {figure.of}" if figure and counted else ""
        counts = "" if figure is None else f", {figure.exact}|{figure.above_20}{of}"
        cells.append(text if text == DASH else text + counts)
    return [*cells, DASH if floor is None else number(floor.mean, 1)]


# Markdown -----------------------------------------------------------------------------------------


def card_table(card: Card) -> TextTable:
    """The card's table for Markdown and LaTeX."""
    header = ("Client", *(f"{heading}" for heading in HEADINGS))
    rows = tuple((_named(row), *map(_cell, figures_of(row))) for row in card.rows)
    return TextTable("What leaks", CAPTION, header, rows, "lrrrr")


def _named(row: CardRow) -> str:
    marks = "".join(flag.mark for flag in row.flags)
    return row.client + (f" ({marks})" if marks else "")


def _cell(figure: CardFigure | None) -> str:
    text = interval_text(figure)
    if figure is None or text == DASH:
        return DASH
    return f"{text}; {counts_text(figure)}; {figure.attack}"


def card_notes(card: Card) -> tuple[str, ...]:
    """What stands under the table, as sentences."""
    flags = [f"{flag.mark}: {flag.name}. {flag.text}" for flag in card.flags]
    of_facts = [f"{heading}: {text}" for heading, text in card.facts]
    tried = [f"Not tried: {'; '.join(card.not_tried)}."] if card.not_tried else []
    change = [f"What would change the figure: {'; '.join(card.would_change)}."]
    return (*flags, *of_facts, *tried, *(change if card.would_change else []))
