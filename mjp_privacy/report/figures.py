"""Pictures of a report: a strip for each line, an overview of all lines, the spread of PSNR.

matplotlib's Figure is used without pyplot: no global state, no display, always the Agg backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mjp_privacy.core.files import write_atomically
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.loading import Line
from mjp_privacy.report.pictures import (
    KINDS,
    Example,
    Picture,
    attack_text,
    examples,
    file_name,
    psnr_text,
    shorten,
    shown_kinds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
SIDE = 1.75  # side of one picture, in inches
MARGIN, STRIP_HEAD, OVERVIEW_HEAD = 0.3, 0.45, 0.6  # inches for text
PER_ROW = 5  # lines beside one another in the overview
SMALLEST_SPREAD = 1e-6  # dB; scores closer together than this have no density to draw

INK, MUTED, FILL, ACCENT = "#1f2933", "#6b7780", "#b8cbd9", "#b4451f"
GRID = "#dfe4e8"


@dataclass(frozen=True)
class Strip:
    """A strip that was written, and its caption."""

    line: Line
    path: Path
    caption: str


def write_strips(lines: Sequence[Line], folder: Path) -> list[Strip]:
    """Write one picture per line; lines without stored reconstructions are skipped."""
    strips = []
    for line in lines:
        shown = examples(line)
        if shown and shown_kinds(shown):
            path = folder / file_name(line)
            save(_strip(shown), path)
            strips.append(Strip(line, path, strip_caption(line, shown)))
    return strips


def strip_caption(line: Line, shown: Sequence[Example]) -> str:
    """Which line the strip shows, at which quantiles, and what PSNR is measured against."""
    n = len(line.scored("psnr", "standard"))
    against = " or ".join(dict.fromkeys(example.against for example in shown))
    percent = ", ".join(f"{100 * q:.0f}" for example in shown for q in example.quantiles)
    return (
        f"Line {line.number}: {line.label}, γ = {line.cell.gamma:g}, {line.cell.dtype}. "
        f"Images at the {percent} % quantiles of this line's PSNR (standard, n={n}), not picked "
        f"by hand; PSNR is measured against {against}."
    )


def _strip(shown: Sequence[Example]) -> Figure:
    from matplotlib.figure import Figure

    kinds = shown_kinds(shown)
    width, height = MARGIN + SIDE * len(shown), STRIP_HEAD + SIDE * len(kinds)
    figure = Figure(figsize=(width, height), dpi=DPI)
    grid = figure.subplots(len(kinds), len(shown), squeeze=False)
    figure.subplots_adjust(
        left=MARGIN / width,
        right=0.995,
        bottom=0.005,
        top=1 - STRIP_HEAD / height,
        wspace=0.03,
        hspace=0.03,
    )
    for column, example in enumerate(shown):
        grid[0, column].set_title(example.title, fontsize=8, color=INK, parse_math=False)
        for row, kind in enumerate(kinds):
            show(grid[row, column], example.pictures[kind])
    for row, kind in enumerate(kinds):
        grid[row, 0].set_ylabel(KINDS[kind], fontsize=9, color=INK)
    return figure


def show(axes: Axes, image: Picture) -> None:
    """Draw a picture (H, W, 3) in [0, 1] without ticks and frame."""
    axes.imshow(image, vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def write_overview(lines: Sequence[Line], path: Path) -> bool:
    """Draw every line's median image; False where no reconstruction is stored."""
    medians = [(line, shown[0]) for line in lines if (shown := examples(line, [0.5]))]
    medians = [(line, example) for line, example in medians if shown_kinds([example])]
    if not medians:
        return False
    save(_overview(medians), path)
    return True


def _overview(medians: Sequence[tuple[Line, Example]]) -> Figure:
    """Blocks of PER_ROW lines; in a block each line is a column and each kind of picture a row."""
    from matplotlib.figure import Figure

    blocks = [medians[start : start + PER_ROW] for start in range(0, len(medians), PER_ROW)]
    kinds = [[kind for kind in KINDS if any(_has(e, kind) for _, e in block)] for block in blocks]
    width = MARGIN + SIDE * len(blocks[0])
    height = sum(OVERVIEW_HEAD + SIDE * len(shown) for shown in kinds)
    figure = Figure(figsize=(width, height), dpi=DPI)
    top = height
    for block, shown in zip(blocks, kinds, strict=True):
        for row, kind in enumerate(shown):
            bottom = top - OVERVIEW_HEAD - SIDE * (row + 1)
            _overview_row(figure, block, kind, bottom, titled=row == 0)
        top -= OVERVIEW_HEAD + SIDE * len(shown)
    return figure


def _has(example: Example, kind: str) -> bool:
    return kind in shown_kinds([example])


def _overview_row(
    figure: Figure, block: Sequence[tuple[Line, Example]], kind: str, bottom: float, *, titled: bool
) -> None:
    """One kind of picture for the lines of a block, `bottom` inches above the lower edge."""
    width, height = figure.get_size_inches()
    for column, (line, example) in enumerate(block):
        left = MARGIN + SIDE * column
        side = 0.98 * SIDE
        axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
        if _has(example, kind):
            show(axes, example.pictures[kind])
        else:
            show(axes, np.ones((1, 1, 3), dtype=np.float32))
            text = "not shuffled" if kind == "input" else "not stored"
            axes.text(0, 0, text, ha="center", va="center", fontsize=8, color=MUTED)
        if titled:
            axes.set_title(_overview_title(line, example), fontsize=7.5, parse_math=False)
        if column == 0:
            axes.set_ylabel(KINDS[kind], fontsize=9, color=INK)


def _overview_title(line: Line, example: Example) -> str:
    cell = line.cell
    return (
        f"{line.number}  {shorten(cell.model.label, 22)} ({cell.setting})\n"
        f"{attack_text(line, 20)}, {cell.dtype}\n"
        f"γ = {cell.gamma:g}, {psnr_text(example.psnr)}"
    )


def write_distributions(lines: Sequence[Line], path: Path) -> bool:
    """Draw per-image PSNR as violins with ceilings; False where no image was scored."""
    scored = [line for line in lines if len(line.scored("psnr", "standard"))]
    if not scored:
        return False
    save(_distributions(scored), path)
    return True


def _distributions(lines: Sequence[Line]) -> Figure:
    from matplotlib.figure import Figure

    width, height = 9.6, 1.15 + 0.42 * len(lines)
    figure = Figure(figsize=(width, height), dpi=DPI)
    axes = figure.add_axes((0.41, 0.6 / height, 0.57, 1 - 1.05 / height))
    for position, line in enumerate(lines):
        _violin(axes, line, position)
    names = [
        f"{line.number}  {shorten(line.cell.model.label, 20)} ({line.cell.setting}) "
        f"{attack_text(line, 20)} {line.cell.dtype.replace('float', 'f')}"
        for line in lines
    ]
    axes.set_yticks(range(len(lines)))
    axes.set_yticklabels(names, fontsize=8, parse_math=False)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(left=0)
    label = f"per-image PSNR (standard), dB; values over {PSNR_CAP:.0f} drawn at {PSNR_CAP:.0f}"
    axes.set_xlabel(label, fontsize=9)
    _tidy(axes)
    return figure


def _tidy(axes: Axes) -> None:
    """A light grid, and a legend in which every label stands once."""
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3}
    axes.legend(once.values(), once.keys(), fontsize=8, frameon=False, borderpad=0.1, **place)


def _violin(axes: Axes, line: Line, position: int) -> None:
    """The density of PSNR, with quartiles as a bar, median as a dot, mean ceiling as a tick."""
    from scipy.stats import gaussian_kde

    values = line.scored("psnr", "standard").clip(upper=PSNR_CAP).to_numpy()
    if np.ptp(values) > SMALLEST_SPREAD:
        grid = np.linspace(values.min(), values.max(), 200)
        density = gaussian_kde(values)(grid)
        half = 0.4 * density / density.max()
        axes.fill_between(grid, position - half, position + half, color=FILL, linewidth=0)
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    axes.plot([low, high], [position] * 2, color=INK, linewidth=2, label="quartiles")
    axes.plot([median], [position], "o", color=INK, markersize=4, label="median")
    ceiling = line.scored("ceiling_psnr", "diagnostic").clip(upper=PSNR_CAP)
    if len(ceiling):
        ends = [position - 0.38, position + 0.38]
        axes.plot([ceiling.mean()] * 2, ends, color=ACCENT, linewidth=1.8, label="mean ceiling")


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG, whole or not at all."""
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
