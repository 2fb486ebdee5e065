"""PSNR against the number of uploads, a curve for each γ: rounds.csv and figures/rounds.png."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from mjp_privacy.core.drawing import COLOURS, colour, drawn, house_style
from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.text import plain
from mjp_privacy.report.pictures.pixels import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
INK, MUTED, ACCENT, GRID = "#1f2933", "#6b7780", "#b4451f", "#dfe4e8"

MARKERS = "osD^vPX"
STATISTICS = {"psnr_median": "median", "psnr_mean": "mean"}


@house_style()
def write_rounds(points: pd.DataFrame, path: Path) -> bool:
    """Draw rounds.png from what `curve_points` returns; False where that is empty."""
    if points.empty:
        return False
    figure = _figure(points)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return True


def _figure(points: pd.DataFrame) -> Figure:
    """One row for each panel: the median on the left, the mean on the right."""
    from matplotlib.figure import Figure

    panels = _drawn([panel for _, panel in points.groupby("panel", sort=True)])
    figure = Figure(figsize=(9.6, 0.35 + 3.4 * len(panels)), dpi=DPI, layout="constrained")
    grid = figure.subplots(len(panels), len(STATISTICS), squeeze=False, sharey="row")
    for row, panel in zip(grid, panels, strict=True):
        for axes, (column, name) in zip(row, STATISTICS.items(), strict=True):
            _curves(axes, panel, column)
            axes.set_title(f"{name}: {_title(panel)}", fontsize=8, color=INK)
        row[0].set_ylabel("PSNR (standard), dB", fontsize=9)
        row[-1].legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in grid[-1]:
        axes.set_xlabel("uploads of the same image", fontsize=9)
    return figure


def _drawn(panels: Sequence[pd.DataFrame]) -> Sequence[pd.DataFrame]:
    """The panels with three or more numbers of uploads; if there are none of these, all panels."""
    curves = [panel for panel in panels if panel["uploads"].nunique() > 2]
    return curves or panels


def _title(panel: pd.DataFrame) -> str:
    first = panel.iloc[0]
    details = [str(first[key]) for key in ("differs", "options") if first[key]]
    return "\n".join(
        [
            f"{shorten(drawn(first['model']), 30)} ({first['setting']}), {first['dtype']}",
            shorten(plain(", ".join([str(first["attack"]), *details])), 60),
        ]
    )


def _curves(axes: Axes, panel: pd.DataFrame, column: str) -> None:
    for number, (ratio, curve) in enumerate(panel.groupby("gamma", sort=True)):
        shade = colour(number)
        style = "-" if number < len(COLOURS) else "--"
        label = f"γ = {ratio:g} (n={_count(curve)})"
        low, high = curve[f"{column}_lo"], curve[f"{column}_hi"]
        axes.fill_between(curve["uploads"], low, high, color=shade, alpha=0.15, linewidth=0)
        axes.plot(
            curve["uploads"],
            curve[column],
            style + MARKERS[number % len(MARKERS)],
            color=shade,
            markersize=3.5,
            linewidth=1.4,
            label=label,
        )
    for name, shade, style in (("grey", MUTED, ":"), ("ceiling", ACCENT, "--")):
        level = panel[f"{name}_mean"].mean()
        if not math.isnan(level):
            label = "floor: grey" if name == "grey" else "ceiling"
            axes.axhline(level, color=shade, linestyle=style, linewidth=1.2, label=label)
    axes.set_xticks(sorted(panel["uploads"].unique()))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _count(curve: pd.DataFrame) -> str:
    low, high = curve["n"].min(), curve["n"].max()
    return str(low) if low == high else f"{low}–{high}"
