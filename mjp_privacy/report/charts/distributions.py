"""How scores are spread over images: success over thresholds, a second metric, ridges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.core.drawing import INK, MUTED, RULE, band, colour, dashes, drawn, house_style
from mjp_privacy.metrics.statistics import PSNR_CAP, SuccessCurve, success_curve, wilson
from mjp_privacy.report.charts.chart import (
    FONT,
    WIDTH,
    Chart,
    axes_at,
    chart,
    hover,
    new_figure,
    stretch,
)
from mjp_privacy.report.figures import THRESHOLDS, summary
from mjp_privacy.report.lines import DIAGNOSTIC, Line, exact_images

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
Named = tuple[str, Line]

MOST = 12
"""More lines than these cannot be told apart; those that follow are in the tables."""
MOST_STEPS = 240
"""A curve of more images is drawn at this many thresholds, where its shares are true as well."""
MOST_TICKS = 100  # images that get a tick each under their ridge
LETTERS = 60  # of a name
ROW, RIDGE_ROW, RIDGE = 17.0, 76.0, 36.0  # heights in pixels: of a name, a ridge with words, alone

PSNR_KNOTS, PSNR_PLACES = (0.0, 8.0, 40.0, PSNR_CAP), (0.0, 2.0, 34.0, 43.6)
"""Pictures become readable between 8 and 40 dB: most of the axis is theirs."""
PSNR_TICKS = (0, 8, 12, 16, 20, 25, 30, 40, 60, 80, 100)
PSNR_AXIS = "PSNR{}, dB (8 to 40 dB stretched)"


def distribution_charts(lines: Sequence[Named]) -> tuple[Chart, ...]:
    """The charts of the section on distributions, for lines with their titles.

    Lines without any image that was tried are left out; empty if all are.
    """
    tried = [(name, line) for name, line in lines if _tried(line)]
    shown = tried[:MOST]
    if not shown:
        return ()
    more = f" {len(tried) - MOST} more lines are in the tables." if len(tried) > MOST else ""
    with house_style():
        charts = [_shares_chart(shown, "psnr", more)]
        for metric in ("lpips", "ssim"):
            if len(charts) == 1 and any(line.count(metric, "standard") for _, line in shown):
                charts.append(_shares_chart(shown, metric, more))
        if any(line.count("psnr", "standard") for _, line in shown):
            charts.append(_ridges_chart(shown, more))
    return tuple(charts)


def _tried(line: Line) -> bool:
    counts = summary(line, "psnr", "standard", interval=False).counts
    return counts.total > counts.unscored


# shares over thresholds ---------------------------------------------------------------------------


def _shares_chart(lines: Sequence[Named], metric: str, more: str) -> Chart:
    """The share of images by one score, a curve for each line; PSNR with its thresholds and the
    mean of a uniform grey."""
    smaller, name = metric == "lpips", metric.upper()
    high = PSNR_CAP if metric == "psnr" else 1.0
    curves = [curve_of(line, metric, 0.0, high, smaller=smaller) for _, line in lines]
    than = "at most" if smaller else "at least"
    caption = (
        f"Share of images whose {name} (standard) is {than} the value below: the higher a curve, "
        "the more leaks. Images that the attack failed on or does not support count as not "
        "recovered; those that could not be scored are left out. " + _band_words(curves)
    )
    figure = new_figure(274 + ROW * len(lines))
    axes = axes_at(figure, 46, 20, WIDTH - 12, 226)
    axes.set_ylim(-1, 101)
    axes.set_yticks(range(0, 101, 25), [f"{share} %" for share in range(0, 101, 25)])
    axes.tick_params(labelsize=FONT - 1)
    if metric == "psnr":
        psnr_axis(axes, f" of {than}")
        for limit in THRESHOLDS:
            axes.axvline(limit, color=MUTED, linewidth=1, linestyle="--")
        caption += f" Dashed: {' and '.join(map(str, THRESHOLDS))} dB."
        if not math.isnan(floor := floor_mean([line for _, line in lines])):
            caption += f" Dotted: what a uniform grey gets on average, {floor:.1f} dB."
            axes.axvline(floor, color=MUTED, linewidth=1.2, linestyle=":")
            axes.text(floor, 103, "floor", ha="center", fontsize=FONT - 1, color=MUTED)
    else:
        axes.set_xlim(*(end([end(curve.thresholds) for curve in curves]) for end in (min, max)))
        axes.set_xlabel(f"{name} of {than}", fontsize=FONT)
    _draw_curves(axes, lines, curves)
    title = f"Share of pictures by {name}"
    return chart(figure, "success" if metric == "psnr" else metric, title, caption + more)


def curve_of(
    line: Line, metric: str, low: float, high: float, *, smaller: bool = False
) -> SuccessCurve:
    """The share of images whose score is at least, or at most if `smaller`, each threshold from
    `low` to `high` and beyond where there are scores; PSNR ends at `high`."""
    values = line.scored(metric, "standard").to_numpy(dtype=float)
    values = values[np.isfinite(values)]
    # right behind a value the share is smaller: a step stands at the value and at its successor
    steps = values if smaller else np.nextafter(values, np.inf)
    if metric == "psnr":
        steps = steps[(steps > low) & (steps < high)]
    places = np.unique([low, *steps, high])
    if len(places) > MOST_STEPS:
        places = places[np.linspace(0, len(places) - 1, MOST_STEPS).round().astype(int)]
    scores, statuses, groups = line.column(metric, "standard")
    return success_curve(scores.to_numpy(), statuses, places, groups=groups, higher=not smaller)


def _band_words(curves: Sequence[SuccessCurve]) -> str:
    """What the bands are, and how wide they would be where they are not drawn."""
    units = [(curve.photographs or curve.of, curve.photographs is not None) for curve in curves]
    fewest, _ = min(unit for unit in units if unit[0])
    grouped = any(of_photographs for _, of_photographs in units)
    kind = "Wilson, crops of one photograph counted together" if grouped else "Wilson"
    what = "photographs" if (fewest, True) in units else "images"
    return (
        f"Bands: pointwise 95 % intervals ({kind}), drawn where some but not all images count; "
        f"all of {fewest} {what} means {100 * wilson(1.0, fewest)[0]:.0f} % or more."
    )


def floor_mean(lines: Sequence[Line]) -> float:
    """Mean PSNR of a uniform grey over the images of the lines, each once; NaN where unknown."""
    by_run: dict[str, pd.Series[float]] = {}
    for line in lines:
        levels = line.scored("grey_psnr", DIAGNOSTIC).clip(upper=PSNR_CAP)
        known = by_run.setdefault(line.run, levels)
        if not known.index.equals(levels.index):
            by_run[line.run] = known.combine_first(levels)
    every = np.concatenate([levels.to_numpy(dtype=float) for levels in by_run.values()])
    return float(every.mean()) if len(every) else math.nan


def psnr_axis(axes: Axes, words: str = "") -> None:
    """0 to 100 dB with most room for 8 to 40."""
    stretch(axes, PSNR_KNOTS, PSNR_PLACES)
    axes.set_xlim(0, PSNR_CAP)
    axes.set_xticks(PSNR_TICKS, map(str, PSNR_TICKS))
    axes.set_xlabel(PSNR_AXIS.format(words), fontsize=FONT)


def _draw_curves(axes: Axes, lines: Sequence[Named], curves: Sequence[SuccessCurve]) -> None:
    """Steps with their bands, and the names under the axes in the order of the curves."""
    drawn_lines = []
    for number, ((name, _), curve) in enumerate(zip(lines, curves, strict=True)):
        if not curve.of:
            continue
        places, share = curve.thresholds, curve.share
        some = np.flatnonzero((share > 0) & (share < 100))
        if len(some):
            at = slice(some[0], some[-1] + 2)
            band(axes, places[at], curve.low[at], curve.high[at], colour(number), step="post")
        x, y = np.append(places, axes.get_xlim()[1]), np.append(share, share[-1])
        look = {"color": colour(number), "linestyle": dashes(number), "linewidth": 1.8}
        (line,) = axes.step(x, y, where="post", label=drawn(name, LETTERS), **look)
        hover(line, f"{name}, n={curve.of}")
        drawn_lines.append((share[-1], float(np.sum(share * np.diff(x))), name, line))
    drawn_lines.sort(key=lambda found: found[:2], reverse=True)
    legend = axes.figure.legend(
        handles=[line for *_, line in drawn_lines],
        **{"loc": "lower left", "fontsize": FONT - 1, "labelspacing": 0.4},
    )
    for text, (_, _, name, _) in zip(legend.get_texts(), drawn_lines, strict=True):
        hover(text, name)


# ridges -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ridge:
    """What one row shows; values are PSNR (standard) capped at 100 dB."""

    values: Floats  # of all scored images
    inexact: Floats  # of those that are not exact in 8 bits
    exact: int | None  # None where it was not counted
    tried: int
    floor: float

    @property
    def words(self) -> str:
        """How many images there are, how many of them are exact, and how many have no picture."""
        lost = self.tried - len(self.values)
        parts = [f"n={len(self.values)}", f"{lost} not recovered" if lost else ""]
        exact = "" if self.exact is None else f"{self.exact} of {self.tried} exact"
        return ", ".join(part for part in (*parts, exact) if part)


def ridge_of(line: Line) -> Ridge:
    """The figures of a line's row."""
    scored = line.scored("psnr", "standard").clip(upper=PSNR_CAP)
    same = scored.index.isin(exact_images(line))
    grey = line.scored("grey_psnr", DIAGNOSTIC).clip(upper=PSNR_CAP)
    counts = summary(line, "psnr", "standard", interval=False).counts
    return Ridge(
        values=scored.to_numpy(dtype=float),
        inexact=scored.to_numpy(dtype=float)[~same],
        exact=int(same.sum()) if line.count("psnr", "paper") else None,
        tried=counts.ok + counts.failed + counts.unsupported,
        floor=float(grey.mean()) if len(grey) else math.nan,
    )


def _ridges_chart(lines: Sequence[Named], more: str) -> Chart:
    """A ridge for each line with scores, one under another."""
    rows = [(number, name, ridge_of(line)) for number, (name, line) in enumerate(lines)]
    rows = [row for row in rows if len(row[2].values)]
    caption = (
        "Density of PSNR (standard, capped at 100 dB) over the images that are not exact, each "
        "ridge to its own height. Dot: median; bar: quartiles; ticks, where they are few: images; "
        "all three with exact images. Right: the share of pictures equal to the original in every "
        "8-bit value. Dotted: mean of a uniform grey."
    )
    tall = RIDGE_ROW * len(rows)
    figure = new_figure(tall + 62)
    axes, bars = axes_at(figure, 8, 18, 376, tall + 18), axes_at(figure, 388, 18, 432, tall + 18)
    axes.grid(axis="x")
    psnr_axis(axes)
    axes.tick_params(labelsize=FONT - 1)
    for place in (axes, bars):
        place.set(ylim=(tall, 0), yticks=[])
        place.spines["left"].set_visible(False)
    bars.set(xlim=(0, 1), xticks=[], frame_on=False)
    if any(row.exact is not None for _, _, row in rows):
        bars.text(0.5, -5, "exact", ha="center", fontsize=FONT - 1)
    for count, (number, name, row) in enumerate(rows, 1):
        base = RIDGE_ROW * count - 10
        title = axes.text(0, base - 54, drawn(name, LETTERS), fontsize=FONT - 1)
        hover(title, name)
        axes.text(0, base - 41, row.words, fontsize=FONT - 2, color=MUTED)
        _draw_ridge(axes, name, row, base, colour(number))
        if row.exact is not None:
            bars.bar(0.5, -RIDGE, 0.9, base, fill=False, edgecolor=RULE)
            bars.bar(
                0.5, -RIDGE * row.exact / row.tried, 0.9, base, color=colour(number), alpha=0.8
            )
    return chart(figure, "spread", "Where the PSNR of the pictures lies", caption + more)


def _draw_ridge(axes: Axes, name: str, row: Ridge, base: float, shade: str) -> None:
    axes.plot([0, PSNR_CAP], [base, base], color=RULE, linewidth=0.8)
    psnr, height = density(row.inexact)
    axes.fill_between(psnr, base, base - RIDGE * height, color=shade, alpha=0.3, linewidth=0)
    axes.plot(psnr, base - RIDGE * height, color=shade, linewidth=1.3)
    if len(row.values) <= MOST_TICKS:
        axes.vlines(row.values, base + 2, base + 7, color=shade, linewidth=1, alpha=0.7)
    axes.vlines(row.floor, base - RIDGE, base, color=INK, linewidth=1.4, linestyle=":")
    low, middle, high = np.quantile(row.values, [0.25, 0.5, 0.75])
    axes.plot([low, high], [base, base], color=INK, linewidth=3, alpha=0.8)
    (dot,) = axes.plot(middle, base, "o", color=INK, markersize=8, clip_on=False)
    hover(dot, f"{name}: median {middle:.1f} dB, {row.words}")


def density(psnr: Floats) -> tuple[Floats, Floats]:
    """PSNR along the axis and the density there, its peak 1; empty for no values.

    A Gaussian kernel along the axis as it is drawn, with 0.7 / 0.9 of Silverman's bandwidth, at
    least 2 pixels; what would lie beyond an end is reflected into the plot.
    """
    from scipy.ndimage import gaussian_filter1d

    if not len(psnr):
        return np.empty(0), np.empty(0)
    cells, wide = 3680, PSNR_PLACES[-1]  # ten for each pixel
    places = np.interp(psnr, PSNR_KNOTS, PSNR_PLACES) / wide * cells
    middle = float(np.subtract(*np.quantile(places, [0.75, 0.25])) / 1.34)
    spread = min(float(np.std(places)), middle) or float(np.std(places))
    bandwidth = max(0.7 * spread * len(places) ** -0.2, 20.0)
    counts, edges = np.histogram(places, cells, (0, cells))
    heights = gaussian_filter1d(counts.astype(float), bandwidth, mode="reflect")
    shown = np.flatnonzero(heights > 1e-3 * heights.max())[::10]
    at = np.interp((edges[shown] + 0.5) * wide / cells, PSNR_PLACES, PSNR_KNOTS)
    return at, heights[shown] / heights.max()
