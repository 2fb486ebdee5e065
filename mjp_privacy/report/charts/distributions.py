"""How scores are spread over images: the share that reaches each threshold, a curve a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from mjp_privacy.core.drawing import MUTED, band, colour, dashes, drawn, house_style
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
from mjp_privacy.report.figures import THRESHOLDS, image_counts
from mjp_privacy.report.lines import DIAGNOSTIC, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Named = tuple[str, Line]

MOST = 12
"""More lines than these cannot be told apart; those that follow are in the tables."""
MOST_STEPS = 240
"""A curve of more images is drawn at this many thresholds, where its shares are true as well."""
LETTERS = 60  # of a name
ROW = 17.0  # pixels of a name under the axes

PSNR_KNOTS, PSNR_PLACES = (0.0, 8.0, 40.0, PSNR_CAP), (0.0, 2.0, 34.0, 43.6)
"""Pictures become readable between 8 and 40 dB: most of the axis is theirs."""
PSNR_TICKS = (0, 8, 12, 16, 20, 25, 30, 40, 60, 80, 100)


def distribution_charts(lines: Sequence[Named]) -> tuple[Chart, ...]:
    """The charts of PSNR, and of LPIPS or else SSIM, for lines with their titles.

    Lines without any image that was tried are left out; empty if all are.
    """
    tried = [(name, line) for name, line in lines if _tried(line)]
    shown = tried[:MOST]
    more = f" {len(tried) - MOST} more lines are in the tables." if len(tried) > MOST else ""
    second = (m for m in ("lpips", "ssim") if any(line.count(m, "standard") for _, line in shown))
    with house_style():
        metrics = ("psnr", *[m for m in (next(second, None),) if m])
        return tuple(_chart(shown, metric, more) for metric in metrics if shown)


def _tried(line: Line) -> bool:
    counts = image_counts(line, "standard")
    return counts.total > counts.unscored


def _chart(lines: Sequence[Named], metric: str, more: str) -> Chart:
    """The share of images by one score; PSNR with its thresholds and the mean of a uniform grey."""
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
        caption += _psnr_axis(axes, lines)
    else:
        ends = np.array([(curve.thresholds.min(), curve.thresholds.max()) for curve in curves])
        axes.set_xlim(ends[:, 0].min(), ends[:, 1].max())
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


def _psnr_axis(axes: Axes, lines: Sequence[Named]) -> str:
    """0 to 100 dB with most room for 8 to 40, and what is marked there, in words."""
    stretch(axes, PSNR_KNOTS, PSNR_PLACES)
    axes.set_xlim(0, PSNR_CAP)
    axes.set_xticks(PSNR_TICKS, map(str, PSNR_TICKS))
    axes.set_xlabel("PSNR of at least, dB (8 to 40 dB stretched)", fontsize=FONT)
    for limit in THRESHOLDS:
        axes.axvline(limit, color=MUTED, linewidth=1, linestyle="--")
    words = f" Dashed: {' and '.join(map(str, THRESHOLDS))} dB."
    if not math.isnan(floor := floor_mean([line for _, line in lines])):
        words += f" Dotted: what a uniform grey gets on average, {floor:.1f} dB."
        axes.axvline(floor, color=MUTED, linewidth=1.2, linestyle=":")
        axes.text(floor, 103, "floor", ha="center", fontsize=FONT - 1, color=MUTED)
    return words


def floor_mean(lines: Sequence[Line]) -> float:
    """Mean PSNR of a uniform grey over the images of the lines, each once; NaN where unknown."""
    by_run: dict[str, pd.Series[float]] = {}
    for line in lines:
        levels = line.scored("grey_psnr", DIAGNOSTIC).clip(upper=PSNR_CAP)
        known = by_run.setdefault(line.run, levels)
        if not known.index.equals(levels.index):
            by_run[line.run] = known.combine_first(levels)
    return float(pd.concat([*by_run.values()]).mean())


def _draw_curves(axes: Axes, lines: Sequence[Named], curves: Sequence[SuccessCurve]) -> None:
    """Steps with their bands, and the names under the axes in the order of the curves."""
    steps = []
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
        (step,) = axes.step(x, y, where="post", label=drawn(name, LETTERS), **look)
        hover(step, f"{name}, n={curve.of}")
        steps.append((share[-1], float(np.sum(share * np.diff(x))), name, step))
    steps.sort(key=lambda found: found[:2], reverse=True)
    look = {"loc": "lower left", "fontsize": FONT - 1, "labelspacing": 0.4}
    legend = axes.figure.legend(handles=[step for *_, step in steps], **look)
    for text, (_, _, name, _) in zip(legend.get_texts(), steps, strict=True):
        hover(text, name)
