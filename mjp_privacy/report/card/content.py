"""The privacy card: the answer of a report on one screen, shown by console, Markdown and page."""

from __future__ import annotations

from dataclasses import dataclass

from mjp_privacy.report.card.flags import Flag


@dataclass(frozen=True)
class CardFigure:
    """What one attacker gets from one client: PSNR (standard, dB, capped at 100) over n images."""

    attack: str  # its label, or that of the attack that was best on most images
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


@dataclass(frozen=True)
class CardRow:
    """One client: what it does, and what each attacker gets from it; None: no such attack ran."""

    client: str  # "plain", "MJP γ .27", "MJP γ .27, gaussian noise 0.01"
    details: str  # "ViT-Ti/16, setting (c), float32, batch 1"
    defended: bool
    accuracy: float | None  # top-1 in percent on the attacked images as fed
    published: CardFigure | None
    one_upload: CardFigure | None
    any_uploads: CardFigure | None
    floor: CardFigure | None
    flags: tuple[Flag, ...] = ()
    accuracy_n: int = 0  # images behind the accuracy
    absent: tuple[str, ...] = ("not run",) * 4
    """Why there is no published, one_upload, any_uploads or floor; read where that is None."""


@dataclass(frozen=True)
class Card:
    """Everything on the first screen."""

    sentence: str  # the answer
    beside: str  # what several uploads give, and what the undefended client gives
    rows: tuple[CardRow, ...]
    further: int  # clients that are in the tables only
    facts: tuple[tuple[str, str], ...]  # ("Who attacks", "an honest but curious server, ..."), ...
    not_tried: tuple[str, ...]
    would_change: tuple[str, ...]
    main: int = 0  # the row that the sentence and the facts are about
    verdict: str = ""  # the answer before all others, of at most thirty words

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Every flag of the rows and their figures, once each."""
        found: dict[str, Flag] = {}
        for row in self.rows:
            figures = (row.published, row.one_upload, row.any_uploads, row.floor)
            of_figures = (flag for figure in figures if figure for flag in figure.flags)
            found |= {flag.mark: flag for flag in (*row.flags, *of_figures)}
        return tuple(found.values())
