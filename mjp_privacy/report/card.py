"""The privacy card: who stands on it, and what each attacker gets from them, as figures and text.

`answer.build_card` makes one; it is shown as a table of Markdown and LaTeX, on the console, as
fields for programs, and on the page by its templates.
"""

from __future__ import annotations

import io
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from mjp_privacy.core.text import counted, cut
from mjp_privacy.metrics.statistics import PSNR_CAP, Share, different
from mjp_privacy.report.clients import PUBLISHED, Client
from mjp_privacy.report.figures import (
    PSNR,
    THRESHOLDS,
    DerivedLine,
    capped_median,
    exact_share,
    success_share,
    summary,
)
from mjp_privacy.report.flags import Flag, client_flags, figure_flags, missed_attacks
from mjp_privacy.report.lines import DIAGNOSTIC, Line, once
from mjp_privacy.report.text import TextTable, capped, one_line

NOT_RUN = "not run"
PLAIN_TO_SEE = THRESHOLDS[0]

HALF = 0.5
"""Share of the pictures at 20 dB or more from which a defence does not protect them."""

FLAT = 3.0
"""By how many dB a picture has to be better than a plain colour to show something: half of the
squared error that the colour leaves is gone then."""

NAMED = 2
"""Attacks of a worst case that the card names; the others are counted together."""

HEADINGS: Mapping[str, str] = {
    "published": "APRIL as published",
    "one_upload": "best, one upload",
    "any_uploads": "best, any uploads",
    "floor": "no gradient",
}
"""The card's columns by the fields of a row."""

ABSENT = {
    "ok": "no attack that knows this client",
    "unscored": "not scored",
    "failed": "failed",
    "unsupported": "does not apply",
}
"""What stands in place of a figure, by the statuses of the attacks' rows; the first that occurs."""

BEST = "Best: each picture's best attack, chosen with the private picture at hand: an upper bound"
CAPTION = (
    "Exactly: equal to the original in every 8-bit value; the share with its 95 % interval, crops "
    "of one photograph counted as one. 20 dB or more: usually recognisable. Mean: of each "
    f"picture's PSNR, at most 100 dB, with its 95 % interval. {BEST}. No gradient: the best "
    "picture made of no upload; an attack that gets no more has failed."
)

FIGURE_FIELDS = (
    *("attack", "line", "of", "exact", "above_20", "n", "mean", "low", "high", "median"),
    *("photographs", "without"),
)
"""Fields of a figure that programs get as they are."""

SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class CardFigure:
    """What one attacker gets from one client: PSNR (standard, dB, capped at 100) over n images."""

    attack: str  # its label; of a worst case "pixel_lattice 116, masked_span 4, others 2"
    line: int  # number of its line in the tables
    mean: float
    low: float  # of the 95 % interval; NaN for a single image
    high: float
    median: float
    n: int  # images scored
    exact: int  # pictures equal to the original in every 8-bit value
    above_20: int  # pictures at 20 dB or more
    of: int  # pictures that the attacker was given
    flags: tuple[Flag, ...] = ()
    trials: float | None = None  # as how many independent pictures they count; None: as themselves
    photographs: int | None = None  # of which the pictures are crops; None: each is one
    without: tuple[str, ...] = ()  # attacks that other clients met and this one did not

    def flagged(self, key: str) -> bool:
        """Whether a flag of this key holds."""
        return any(flag.key == key for flag in self.flags)

    @property
    def most(self) -> bool:
        """Whether so many pictures are at 20 dB or more that they are not protected."""
        return self.above_20 >= HALF * self.of

    @property
    def share(self) -> Share:
        """The exact ones, as a share with its interval."""
        return Share(self.exact, self.of, self.trials)

    def counts(self) -> str:
        """`116 of 200 exactly, 188 at 20 dB or more`."""
        return f"{self.exact} of {self.of} exactly{self.reached and f', {self.reached}'}"

    @property
    def reached(self) -> str:
        """`188 at 20 dB or more`; empty where all are exact."""
        if self.exact == self.of:
            return ""
        count = {0: "none", self.of: "all"}.get(self.above_20, str(self.above_20))
        return f"{count} at {PLAIN_TO_SEE} dB or more"

    def level(self) -> str:
        """The mean: `71.7 dB [66.9, 76.3]`, `≥ 100 dB` at the cap, with the number of pictures
        where not all were scored."""
        bounded = not math.isnan(self.low) and self.mean < PSNR_CAP
        bounds = f" [{capped(self.low, 1)}, {capped(self.high, 1)}]" if bounded else ""
        over = f" over {counted(self.n, 'picture')}" if self.n != self.of else ""
        return f"{capped(self.mean, 1)} dB{bounds}{over}"


@dataclass(frozen=True)
class CardRow:
    """One client, and what each attacker gets from it; None: no such attack ran."""

    client: Client
    accuracy: float | None  # top-1 in percent on the attacked images as fed
    published: CardFigure | None
    one_upload: CardFigure | None
    any_uploads: CardFigure | None
    floor: CardFigure | None
    flags: tuple[Flag, ...] = ()
    accuracy_n: int = 0  # images behind the accuracy
    absent: Mapping[str, str] = field(default_factory=dict)
    """Why a figure is None, by its column of HEADINGS."""

    @property
    def figures(self) -> dict[str, CardFigure | None]:
        """Its figures by the columns of HEADINGS."""
        return {column: getattr(self, column) for column in HEADINGS}

    @property
    def best(self) -> CardFigure | None:
        """The figure that decides: one upload's if most pictures leak from it, else the worse of
        one and of several; None where nothing was scored. Plain pictures do not count."""
        single, several = self.one_upload, self.any_uploads
        if single is None or several is None:
            return single or several
        telling = single.above_20 - plain_pictures(self.client, self.client.one_upload)
        if telling >= HALF * single.of:
            return single
        more = several.above_20 - plain_pictures(self.client, self.client.any_uploads)
        one = telling / single.of, single.exact / single.of
        return several if (more / several.of, several.exact / several.of) > one else single

    @property
    def by_several(self) -> bool:
        """Whether that is the figure of several uploads."""
        return self.best is self.any_uploads is not None

    @property
    def deciding(self) -> Line | None:
        """The line of that figure."""
        return self.client.any_uploads if self.by_several else self.client.one_upload


@dataclass(frozen=True)
class Card:
    """Everything on the first screen."""

    verdict: str  # the answer, of at most thirty words
    assumptions: str  # who the attacker is, and what is assumed
    beside: str  # what the rows do not say: pictures that do not count, crops
    rows: tuple[CardRow, ...] = ()
    further: int = 0  # clients that are in the tables only
    facts: tuple[tuple[str, str], ...] = ()  # ("Who attacks", "an honest but curious server"), ...
    not_tried: tuple[str, ...] = ()
    would_change: tuple[str, ...] = ()
    main: int = 0  # the row that the verdict and the facts are about

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Every flag of the rows and their figures once: the footnotes in the order of the table,
        whose numbers are their places from 1."""
        flagged = (of for row in self.rows for of in (row, *row.figures.values()) if of)
        return tuple(dict.fromkeys(flag for of in flagged for flag in of.flags))

    @property
    def columns(self) -> dict[str, str]:
        """The headings of the columns by the fields of a row, without those that no row has."""
        used = {c for row in self.rows for c, figure in row.figures.items() if figure is not None}
        return {column: heading for column, heading in HEADINGS.items() if column in used}

    def numbers(self, flagged: CardFigure | CardRow) -> str:
        """The footnotes of a figure or a client: `¹,³`."""
        places = {flag.key: place for place, flag in enumerate(self.flags, 1)}
        numbers = sorted(places[flag.key] for flag in flagged.flags)
        return ",".join(map(str, numbers)).translate(SUPERSCRIPTS)


# figures ------------------------------------------------------------------------------------------


@once
def card_row(client: Client) -> CardRow:
    """What each attacker gets from this client."""
    lines = {column: getattr(client, column) for column in HEADINGS}
    figures = {c: None if line is None else card_figure(client, line) for c, line in lines.items()}
    flags, best = client_flags(client), figures["one_upload"]
    if best is not None and best.exact == best.of:
        flags = tuple(flag for flag in flags if flag.key != "fewer_attacks")  # nothing is left
    elif best is not None and any(flag.key == "fewer_attacks" for flag in flags):
        figures["one_upload"] = replace(best, without=missed_attacks(client, client.others))
    drawing = [x for x in client.attacks if "no picture" not in x.traits]
    tried: dict[str, list[Line]] = {
        "published": [x for x in drawing if x.cell.known_as == PUBLISHED],
        "one_upload": [x for x in drawing if x.uploads == 1],
        "any_uploads": [x for x in drawing if x.uploads > 1],
        "floor": [],
    }
    absent = {}
    for column, lines_of in tried.items():
        found = {s for x in lines_of for s in different(x.column("psnr", "standard").statuses)}
        why = (words for status, words in ABSENT.items() if status in found)
        absent[column] = next(why, NOT_RUN)
    hits = client.of_images("top1", "intact")
    return CardRow(
        client=client,
        accuracy=100 * float(hits.sum()) / len(hits) if len(hits) else None,
        accuracy_n=len(hits),
        flags=flags,
        absent=absent,
        **figures,
    )


@once
def plain_pictures(client: Client, line: Line | None) -> int:
    """How many pictures of a line are at 20 dB or more and show little all the same: they are not
    exact, and less than FLAT dB better than what is known of them without any gradient, or than
    their own mean colour. That is what a flat picture scores by its flatness."""
    if line is None:
        return 0
    psnr, exact = line.scored(*PSNR), line.exact_images
    known = [floor.scored(*PSNR) for floor in client.floors]
    known.append(client.of_images("grey_psnr", DIAGNOSTIC))
    floors = pd.concat(known).groupby(level=0).max()

    def of_one_colour(image: str) -> bool:
        tensors = line.reconstruction(image) or {}
        if (target := tensors.get("target")) is None:
            return False
        error = (target - target.mean((-2, -1), keepdim=True)).double().square().mean()
        return psnr[image] < FLAT - 10 * math.log10(max(float(error), sys.float_info.min))

    reached = psnr[(psnr >= PLAIN_TO_SEE) & ~psnr.index.isin(exact)]
    better = reached >= floors.reindex(reached.index).fillna(-math.inf) + FLAT
    stored = reached.index[better].intersection(line.picture_ids)
    return int((~better).sum()) + sum(map(of_one_colour, stored))


def card_figure(client: Client, line: Line) -> CardFigure:
    """The figure of one attack, of a worst case or of a control, with its flags."""
    score, given = summary(line, "psnr", "standard"), success_share(line, PLAIN_TO_SEE)
    counts = line.counts.items() if isinstance(line, DerivedLine) else ()
    chosen = sorted((item for item in counts if item[1]), key=lambda item: -item[1])
    named = [f"{attack} {count}" for attack, count in chosen[:NAMED]]
    rest = sum(count for _, count in chosen[NAMED:])
    named += [f"others {rest}"] if rest else []
    return CardFigure(
        attack=chosen[0][0] if len(chosen) == 1 else ", ".join(named) or line.attack,
        line=line.number,
        mean=score.mean,
        low=score.low,
        high=score.high,
        median=capped_median(line),
        n=score.n,
        exact=exact_share(line).count,
        above_20=given.count,
        of=given.of,
        trials=given.trials,
        flags=figure_flags(client, line),
        photographs=None if line.groups is None else line.units,
    )


# as a table ---------------------------------------------------------------------------------------


def card_table(card: Card, title: str = "What leaks") -> TextTable:
    """The card for Markdown and LaTeX; its caption names the flags by their numbers."""
    rows = []
    for row in card.rows:
        cells = [_cell(card, row, column) for column in card.columns]
        rows.append((row.client.title + card.numbers(row), *cells))
    header = ("Client", *card.columns.values())
    caption = f"{CAPTION} {flag_names(card)}".strip()
    return TextTable(title, caption, header, tuple(rows), "l" * len(header))


def every_client(card: Card, clients: Sequence[Client]) -> TextTable:
    """The same for all of the clients, where the card has no room for them: its own come first, so
    that footnotes keep their numbers."""
    in_order = dict.fromkeys((*(row.client for row in card.rows), *clients))
    return card_table(replace(card, rows=tuple(map(card_row, in_order))), "Every client")


def flag_names(card: Card) -> str:
    """`¹ altered client; ² below the floor`."""
    places = (str(place).translate(SUPERSCRIPTS) for place in range(1, 1 + len(card.flags)))
    return "; ".join(f"{place} {f.name}" for place, f in zip(places, card.flags, strict=True))


def _cell(card: Card, row: CardRow, column: str) -> str:
    figure = row.figures[column]
    if figure is None:
        return row.absent[column]
    if column == "floor":
        return f"mean {figure.level()}, {figure.attack.replace('_', ' ')}"
    missed = f"; {' and '.join(figure.without)} not run" if figure.without else ""
    reached = figure.reached and f", {figure.reached}"
    by = f"; by {figure.attack}" if column != "published" else ""
    text = f"{figure.share.text()} exactly{reached}; mean {figure.level()}"
    return f"{text}{card.numbers(figure)}{by}{missed}"


def card_notes(card: Card) -> tuple[str, ...]:
    """What stands under the table: its footnotes by number, then the facts, as sentences."""
    footnotes = [f"{place}. {flag.text}" for place, flag in enumerate(card.flags, 1)]
    of_facts = [f"{heading}: {text}" for heading, text in card.facts]
    tried = [f"Not tried: {'; '.join(card.not_tried)}."] if card.not_tried else []
    change = [f"What would change the figure: {'; '.join(card.would_change)}."]
    return (*footnotes, *of_facts, *tried, *(change if card.would_change else []))


# on the console -----------------------------------------------------------------------------------

WIDTH = 120

LONGEST = 80
"""Letters of a client's name, the middle of longer ones is left out."""

REASONS_SHOWN = 4
"""Reasons of missing scores that are printed."""


def console_text(card: Card, reasons: Sequence[str]) -> str:
    """The answer and the commonest reasons of missing scores, as `notes.not_scored` makes them,
    each on one line."""
    more = len(reasons) - REASONS_SHOWN
    tail = [f"and {counted(more, 'further reason')}: see the page"] if more > 0 else []
    said = [line for reason in (*reasons[:REASONS_SHOWN], *tail) for line in _wrapped(reason, 1)]
    return "\n".join([console_card(card), *said, *([""] if said else [])])


def console_card(card: Card) -> str:
    """The verdict, the assumptions, a line for each client, and the footnotes by number."""
    said = _wrapped(card.verdict, 2) + _wrapped(card.assumptions or card.beside, 3)
    if not card.columns:
        return "\n".join(said + _wrapped(card.beside, 9) * bool(card.assumptions)) + "\n"
    further = f"{counted(card.further, 'further client')} on the page" if card.further else ""
    best = BEST if any("best" in heading for heading in card.columns.values()) else ""
    under = _wrapped(". ".join(filter(None, (best, flag_names(card), further))), 3)
    return "\n".join([*said, *_aligned(card), *under]) + "\n"


def _wrapped(text: str, most: int) -> list[str]:
    return textwrap.wrap(
        one_line(text), WIDTH, max_lines=most, placeholder=" …", break_on_hyphens=False
    )


def _aligned(card: Card) -> list[str]:
    """Aligned columns of words; a client's name that has no room goes on in the next line."""
    table = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    table.add_column("Client", overflow="fold")
    for heading in card.columns.values():
        table.add_column(heading, no_wrap=True, overflow="fold")
    for row in card.rows:
        name = cut(one_line(row.client.title), LONGEST) + card.numbers(row)
        cells = [_short_cell(card, row, column) for column in card.columns]
        table.add_row(*map(Text, (name, *cells)))
    out = io.StringIO()
    # no colours and a fixed width, so that the same rows print the same text everywhere
    Console(file=out, width=WIDTH, color_system=None, legacy_windows=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _short_cell(card: Card, row: CardRow, column: str) -> str:
    """`5/20 exact, 17 ≥ 20 dB`; the mean where no picture is that good."""
    figure = row.figures[column]
    if figure is None:
        return row.absent[column]
    if column == "floor":
        return f"{capped(figure.mean, 1)} dB"
    said = f"{figure.exact}/{figure.of} exact"
    if figure.exact < figure.of:
        said += f", {figure.above_20} ≥ {PLAIN_TO_SEE} dB"
    if not figure.above_20:
        said = f"0/{figure.of}, mean {capped(figure.mean, 1)} dB"
    return said + card.numbers(figure)


# for programs -------------------------------------------------------------------------------------


def as_fields(card: Card) -> dict[str, object]:
    """The card for programs, as docs/json.md has it: flags are named by their keys."""
    clients = [
        {
            **{"client": row.client.title, "details": row.client.details},
            "defended": row.client.defended,
            **{"accuracy": row.accuracy, "accuracy_n": row.accuracy_n},
            **{"flags": [flag.key for flag in row.flags]},
            **{column: {"absent": why} for column, why in row.absent.items()},
            **{column: _as_fields(figure) for column, figure in row.figures.items() if figure},
        }
        for row in card.rows
    ]
    return {
        **{name: getattr(card, name) for name in ("verdict", "assumptions", "beside")},
        "about": card.main if card.rows else None,
        "clients": clients,
        "further_clients": card.further,
        "flags": {flag.key: flag.text for flag in card.flags},
        "facts": dict(card.facts),
        "not_tried": card.not_tried,
        "would_change": card.would_change,
    }


def _as_fields(figure: CardFigure) -> dict[str, object]:
    low, high = figure.share.interval
    fields = {name: getattr(figure, name) for name in FIGURE_FIELDS}
    shares = {"exact_percent_low": low, "exact_percent_high": high}
    return fields | shares | {"flags": [flag.key for flag in figure.flags]}
