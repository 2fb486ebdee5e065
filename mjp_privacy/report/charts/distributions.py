"""How scores are spread over images: success over thresholds, a second metric, ridges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.metrics.coded import Images
from mjp_privacy.metrics.shares import wilson
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.charts.axes import (
    ROW,
    STRETCH_NOTE,
    EndLabel,
    Frame,
    end_labels,
    psnr_scale,
    psnr_ticks,
    round_ticks,
)
from mjp_privacy.report.charts.chart import Chart
from mjp_privacy.report.charts.curves import Curve, ecdf, success
from mjp_privacy.report.charts.names import short_names
from mjp_privacy.report.charts.ridges import ridge_of, ridges_chart
from mjp_privacy.report.charts.svg import WIDTH, Drawing, Scale, dash, shade
from mjp_privacy.report.lines import THRESHOLDS, Line, summary

MOST = 12
"""More curves than these cannot be told apart; the lines that follow are in the tables."""

LEFT, LABELS = 44.0, 480.0  # where plots start, and where the labels beside them do
TALL = 300.0


@dataclass(frozen=True)
class Named:
    """A line with its name and its place among the colours."""

    line: Line
    name: str
    index: int


def distribution_charts(
    lines: Sequence[Line],
    derived: Sequence[Line] = (),
    *,
    names: Mapping[int, str] | None = None,
) -> tuple[Chart, ...]:
    """The charts of the section on distributions, for lines chosen by the caller.

    names: what to call lines, by their number; without it each is called by its attack and what
    differs. Lines without any image that was tried are left out; empty if all are.
    """
    tried = [line for line in (*lines, *derived) if _tried(line)]
    shown = tried[:MOST]
    if not shown:
        return ()
    given = names or {}
    texts = [given.get(n.number, text) for n, text in zip(shown, short_names(shown), strict=True)]
    named = [Named(line, text, i) for i, (line, text) in enumerate(zip(shown, texts, strict=True))]
    left_out = f" {len(tried) - MOST} more lines are in the tables." if len(tried) > MOST else ""
    charts = [_success_chart(named, left_out)]
    second = _second_metric(named)
    if second:
        charts.append(_ecdf_chart(named, second, left_out))
    scored = [item for item in named if len(item.line.scored("psnr", "standard"))]
    if scored:
        rows = [(ridge_of(item.line, item.name), shade(item.index)) for item in scored]
        charts.append(ridges_chart(rows, left_out))
    return tuple(charts)


def _tried(line: Line) -> bool:
    counts = summary(line, "psnr", "standard", interval=False).counts
    return counts.total > counts.unscored


# success over thresholds --------------------------------------------------------------------------


def _success_chart(named: Sequence[Named], left_out: str) -> Chart:
    title = "Share of pictures recovered, for every PSNR one may ask for"
    curves = [success(item.line) for item in named]
    floor = floor_mean([item.line for item in named])
    caption = (
        "Share of images whose PSNR (standard) reaches the value below; the dashed marks are at "
        f"{' and '.join(map(str, THRESHOLDS))} dB. Images that the attack failed on or does not "
        "support count as not recovered; those that could not be scored are left out. "
        + _band_words(curves)
        + _floor_words(floor)
        + left_out
    )
    frame, drawing = _frame(psnr_scale(LEFT, LABELS - 40), title, caption, len(named))
    frame.x_axis(drawing, psnr_ticks(frame.x), f"PSNR of at least, dB ({STRETCH_NOTE})")
    for limit in THRESHOLDS:
        frame.upright(drawing, limit, dash="5 4")
    if not math.isnan(floor):
        frame.upright(drawing, floor, dash="1 3", label="floor")
    _draw_curves(drawing, frame, named, curves)
    return Chart("success", title, caption, drawing.render())


def _band_words(curves: Sequence[Curve | None]) -> str:
    """What the bands are, and how wide they would be where they are not drawn."""
    drawn = [curve for curve in curves if curve]
    units = [(curve.photographs or curve.n, curve.photographs is not None) for curve in drawn]
    fewest, _ = min(units)
    grouped = any(of_photographs for _, of_photographs in units)
    kind = "Wilson, crops of one photograph counted together" if grouped else "Wilson"
    what = "photographs" if (fewest, True) in units else "images"
    return (
        f"Bands: pointwise 95 % intervals ({kind}), drawn where some but not all images count; "
        f"all of {fewest} {what} means {100 * wilson(1.0, fewest)[0]:.0f} % or more."
    )


def floor_mean(lines: Sequence[Line]) -> float:
    """Mean PSNR of a uniform grey over the images of the lines, each once; NaN where unknown."""
    by_run: dict[str, list[Line]] = {}
    for line in lines:
        by_run.setdefault(line.run, []).append(line)
    levels = np.concatenate([_floor_levels(of_run) for of_run in by_run.values()])
    return float(np.mean(levels)) if len(levels) else math.nan


def _floor_levels(lines: Sequence[Line]) -> NDArray[np.float64]:
    """PSNR of a uniform grey of each image of one run's lines."""
    distinct = {line.images for line in lines}
    names = (name for images in distinct for name in images.ids)
    every = lines[0].images if len(distinct) == 1 else Images.of(names)
    levels = np.full(len(every), np.nan)
    for line in lines:
        column = line.column("grey_psnr", "diagnostic")
        column = column.chosen(column.scored)
        places = every.places(line.images.ids)[column.at]
        levels[places] = np.minimum(column.values, PSNR_CAP)
    return levels[~np.isnan(levels)]


def _floor_words(floor: float) -> str:
    if math.isnan(floor):
        return ""
    return f" Dotted: what a uniform grey gets on average, {floor:.1f} dB."


# a second metric ----------------------------------------------------------------------------------


def _second_metric(named: Sequence[Named]) -> str:
    """LPIPS where some line has it, else SSIM, else nothing."""
    for metric in ("lpips", "ssim"):
        if any(len(item.line.scored(metric, "standard")) for item in named):
            return metric
    return ""


def _ecdf_chart(named: Sequence[Named], metric: str, left_out: str) -> Chart:
    smaller = metric == "lpips"
    words = ("at most", "below") if smaller else ("at least", "above")
    title = f"Share of pictures by {metric.upper()}"
    curves = [ecdf(item.line, metric, smaller=smaller) for item in named]
    caption = (
        f"Share of images whose {metric.upper()} is {words[0]} the value below "
        f"({'0 is equal to the original' if smaller else '1 is equal to the original'}): the "
        "higher a curve, the more leaks. Images without a reconstruction count as not recovered. "
        + _band_words(curves)
        + left_out
    )
    low, high = _extent([curve for curve in curves if curve])
    frame, drawing = _frame(Scale((low, high), (LEFT, LABELS - 40)), title, caption, len(named))
    ticks = {tick: f"{tick:g}" for tick in round_ticks(low, high, 8)}
    frame.x_axis(drawing, ticks, f"{metric.upper()} of {words[0]}")
    _draw_curves(drawing, frame, named, curves)
    return Chart(metric, title, caption, drawing.render())


def _extent(curves: Sequence[Curve]) -> tuple[float, float]:
    """From 0 (or below) to 1 (or above): all values lie inside."""
    places = np.concatenate([[0.0, 1.0], *(curve.places for curve in curves)])
    return float(places.min()), float(places.max())


# both ---------------------------------------------------------------------------------------------


def _frame(x: Scale, title: str, caption: str, count: int) -> tuple[Frame, Drawing]:
    tall = max(TALL, ROW * count)
    top = 40.0
    y = Scale((0.0, 1.0), (top + tall, top))
    frame = Frame(x.pixels[0], top, x.pixels[-1], top + tall, x, y)
    drawing = Drawing(top + tall + 44, title, caption)
    ticks = {share / 100: f"{share} %" for share in (0, 25, 50, 75, 100)}
    frame.y_axis(drawing, ticks, "share of images")
    return frame, drawing


def _draw_curves(
    drawing: Drawing, frame: Frame, named: Sequence[Named], curves: Sequence[Curve | None]
) -> None:
    drawn = [(item, curve) for item, curve in zip(named, curves, strict=True) if curve]
    for item, curve in drawn:
        corners = _band(frame, curve)
        if corners:
            drawing.area(corners, shade(item.index), 0.12)
    for item, curve in drawn:
        points = _steps(frame, curve.places, curve.shares, frame.x.values[-1])
        look = {"width": 1.8, "dash": dash(item.index)}
        drawing.path(points, shade(item.index), title=f"{item.name}, n={curve.n}", **look)
    drawn.sort(key=lambda pair: (-pair[1].shares[-1], -pair[1].area))
    labels = [
        EndLabel(frame.y.at(curve.shares[-1]), item.name, shade(item.index), dash(item.index))
        for item, curve in drawn
    ]
    end_labels(drawing, frame, labels, left=LABELS, right=WIDTH)


def _steps(
    frame: Frame, places: NDArray[np.float64], shares: NDArray[np.float64], end: float
) -> list[tuple[float, float]]:
    """Corners of a curve whose share holds from its place to the next, the last to `end`."""
    points: list[tuple[float, float]] = []
    for place, share in zip(places, shares, strict=True):
        corner = frame.at(float(place), float(share))
        if points:
            points.append((corner[0], points[-1][1]))
        points.append(corner)
    points.append((frame.x.at(end), points[-1][1]))
    return points


def _band(frame: Frame, curve: Curve) -> list[tuple[float, float]]:
    """The outline of the band, from the first to the last place with some but not all images."""
    some = np.flatnonzero((curve.shares > 0) & (curve.shares < 1))
    if not len(some) or np.isnan([curve.low[some], curve.high[some]]).any():
        return []
    first, last = some[0], some[-1] + 1
    places = curve.places[first:last]
    end = float(curve.places[last]) if last < len(curve.places) else frame.x.values[-1]
    upper = _steps(frame, places, curve.high[first:last], end)
    return upper + _steps(frame, places, curve.low[first:last], end)[::-1]
