"""What is left of pictures that share a batch: batches.csv and figures/batches.png.

A panel is one client but for its batch; the curves count uploads. Every point is the attack that
recovers most pictures there, which the CSV names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from mjp_privacy.core.drawing import COLOURS, colour, drawn, house_style
from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.text import plain
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.pictures.pixels import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
INK, MUTED, GRID = "#1f2933", "#6b7780", "#dfe4e8"
MARKERS = "osD^vPX"


@house_style()
def write_batches(points: pd.DataFrame, path: Path) -> bool:
    """Draw batches.png from what `batch_points` returns; False where that is empty."""
    if points.empty:
        return False
    figure = _figure(points)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return True


def _figure(points: pd.DataFrame) -> Figure:
    """A row for each panel: the share of exact pictures on the left, the median on the right."""
    from matplotlib.figure import Figure

    panels = [panel for _, panel in points.groupby("panel", sort=True)]
    figure = Figure(figsize=(9.6, 0.35 + 2.9 * len(panels)), dpi=DPI, layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False)
    for row, panel in zip(grid, panels, strict=True):
        share = panel.assign(
            shown=100 * panel["exact"] / panel["n"],
            low=panel["exact_lo"],
            high=panel["exact_hi"],
        )
        _curves(row[0], share)
        row[0].set_ylim(-3, 103)
        row[0].set_ylabel("exact pictures, %", fontsize=9)
        _curves(
            row[1],
            panel.rename(
                columns={
                    "psnr_median": "shown",
                    "psnr_median_lo": "low",
                    "psnr_median_hi": "high",
                }
            ),
        )
        _floor(row[1], panel)
        row[1].set_ylim(0, PSNR_CAP + 3)
        row[1].set_ylabel("median PSNR, dB", fontsize=9)
        row[0].set_title(_title(panel), fontsize=8, color=INK, loc="left")
        row[1].legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in grid[-1]:
        axes.set_xlabel("pictures in a batch", fontsize=9)
    return figure


def _title(panel: pd.DataFrame) -> str:
    first = panel.iloc[0]
    ratio = f", γ {first['gamma']:g}" if first["gamma"] else ""
    facts = f"{drawn(first['model'])} ({first['setting']}), {first['dtype']}{ratio}"
    return "\n".join([shorten(facts, 60), shorten(plain(first["differs"] or "as it is"), 60)])


def _curves(axes: Axes, panel: pd.DataFrame) -> None:
    """`shown` with the interval from `low` to `high` over the batch, a curve for each number of
    uploads."""
    for number, (uploads, curve) in enumerate(panel.groupby("uploads", sort=True)):
        shade, style = colour(number), "-" if number < len(COLOURS) else "--"
        axes.fill_between(
            curve["batch"], curve["low"], curve["high"], color=shade, alpha=0.12, linewidth=0
        )
        axes.plot(
            curve["batch"],
            curve["shown"],
            style + MARKERS[number % len(MARKERS)],
            color=shade,
            markersize=3.5,
            linewidth=1.4,
            label=f"{uploads} upload{'' if uploads == 1 else 's'} (n={curve['n'].max()})",
        )
    axes.set_xscale("log", base=2)
    ticks = sorted(panel["batch"].unique())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _floor(axes: Axes, panel: pd.DataFrame) -> None:
    level = panel["grey_mean"].mean()
    if not math.isnan(level):
        axes.axhline(level, color=MUTED, linestyle=":", linewidth=1.2, label="floor: grey")
