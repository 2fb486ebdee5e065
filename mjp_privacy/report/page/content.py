"""What index.html is made of. Whoever builds a page fills these; the templates read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mjp_privacy.report.card import Card
from mjp_privacy.report.charts.chart import Chart
from mjp_privacy.report.notes import Flag, Section
from mjp_privacy.report.tables.text import TextTable


@dataclass(frozen=True)
class PageLine:
    """One line of the tables, for sorting, filtering and drill-down; NaN where there is none."""

    number: int
    run: str
    model: str
    client: str
    setting: str
    gamma: float
    dtype: str
    attack: str
    role: str  # attack, floor, ceiling, worst_case, attackers_choice
    uploads: int
    n: int
    not_scored: int
    exact: int
    above_20: int
    of: int
    scores: Mapping[str, tuple[float, float, float]]  # by metric: mean, low, high (standard)
    median_psnr: float
    marks: tuple[str, ...] = ()  # keys of its flags
    folded: bool = False  # float64 lines and controls: shown on demand
    remark: str = ""  # why it has no figures


@dataclass(frozen=True)
class PagePicture:
    """One private image with what every line made of it. Pictures are data URIs by key."""

    image_id: str
    original: str | None  # keys of `PageContent.pictures`; None on recorded uploads without truth
    fed: str | None  # what the card's client fed; None where that equals the original
    masks: Mapping[int, str]  # by line: "0110…", one digit for each patch, row by row; 1: masked
    lines: Mapping[int, str]  # by line: key of its reconstruction
    strip: bool = False  # one of the pictures at fixed quantiles that stand in the card's strip
    inputs: Mapping[int, str] = field(default_factory=dict)
    """By line: key of what its client fed, where that is not the original."""


@dataclass(frozen=True)
class PageContent:
    """All of index.html."""

    title: str
    citation: str
    card: Card
    strip_columns: tuple[tuple[str, int], ...]  # (heading, line) of the strip's columns, in order
    lines: tuple[PageLine, ...]
    scores: Mapping[int, Mapping[str, tuple[float | None, ...]]]
    """Per-image scores: by line, by metric (psnr, ssim, lpips, mse, fft2d, gradient_residual), in
    the order of `image_ids`. PSNR of an exact image is inf."""
    image_ids: tuple[str, ...]
    pictures: Mapping[str, str]  # data URIs by key
    shown: tuple[PagePicture, ...]
    charts: Mapping[str, tuple[Chart, ...]]
    """By section: "distributions", "uploads", "tradeoff"."""
    tables: tuple[TextTable, ...]  # shown open: comparison of clients, beside the paper, tests
    folded_tables: tuple[TextTable, ...]  # in <details>: diagnostics, timings
    notes: tuple[Section, ...]
    glossary: tuple[tuple[str, str], ...]  # (term, definition)
    provenance: tuple[tuple[str, str], ...]  # ("torch", "2.11.0"), ("commit", ...), hashes
    reproduce: str  # shell commands that make this report again
    downloads: tuple[tuple[str, str], ...]  # (file beside the page, what it holds)
    further: Mapping[str, str] = field(default_factory=dict)
    """A sentence under a heading, also where its section holds nothing else, by section: "clients",
    "ladder", "distributions", "uploads", "tradeoff", "tables", "pictures" or "downloads"."""
    table5: TextTable | None = None  # the section after the card: the paper's Table 5
    comparisons: tuple[TextTable, ...] = ()  # the section after that: clients side by side
    flags: tuple[Flag, ...] = ()  # of lines, where the card does not have them
    strip_caption: str = "The same pictures in every column, at fixed quantiles, never picked."
    exact: Mapping[int, tuple[bool | None, ...]] = field(default_factory=dict)
    """By line, in the order of `image_ids`: equal to the original in every 8-bit value."""
