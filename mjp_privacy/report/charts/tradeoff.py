"""Accuracy against leakage: families by colour and shape, labels apart, the Pareto front."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.charts.axes import Frame, round_ticks
from mjp_privacy.report.charts.chart import Chart
from mjp_privacy.report.charts.labels import Anchor, Box, Segment, fit, place, text_width
from mjp_privacy.report.charts.svg import INK, MUTED, SIZE, WIDTH, Drawing, Scale, stretched
from mjp_privacy.report.charts.tradeoff_points import (
    FAMILIES,
    TradeoffPoint,
    pareto_front,
    strength_lines,
)
from mjp_privacy.report.lines import THRESHOLDS

LEAKAGE_ROOM = ((8.0, 0.4), (20.0, 1.0), (40.0, 0.28), (100.0, 0.07))
LEAKAGE_TICKS = (0, 4, 8, 10, 12, 14, 16, 18, 20, 25, 30, 40, 60, 100)
LEFT, RIGHT, TALL = 48.0, 700.0, 430.0
LONGEST = 150.0  # pixels of a label
PAD = 5.0  # on either side of it
MARGIN = 3.0  # dB of room on the private side

CAPTION = (
    "Accuracy against the PSNR (standard, capped at 100 dB) of the best attack on each image: the "
    "upper left is best. Light bars: 95 % intervals. Coloured lines join clients of one kind in "
    "the order of strength. Steps: the Pareto front, clients that no other beats in both figures; "
    "it does not take the intervals into account. Dashed: "
    f"{THRESHOLDS[0]} dB, from which the content of a picture is usually recognisable."
)


def tradeoff_chart(
    points: Sequence[TradeoffPoint],
    title: str = "Accuracy against leakage",
    *,
    name: str = "tradeoff",
    floor: float = math.nan,
    leakage: str = "PSNR of the best attack, dB",
) -> Chart:
    """The chart of some clients; those without accuracy or leakage are counted in the caption.

    floor: PSNR of a uniform grey in dB, drawn as a dotted line. leakage: the label of its axis.
    """
    shown = [point for point in points if point.drawable]
    caption = CAPTION + _remarks(points, floor)
    drawing = Drawing(height_of(shown), title, caption)
    unlabelled = draw(drawing, shown, floor=floor, leakage=leakage)
    if unlabelled:
        caption += f" No room for the names of {unlabelled}: they show on hover."
    return Chart(name, title, caption, drawing.render())


def height_of(points: Sequence[TradeoffPoint], heading: float = 0.0) -> float:
    """How tall the drawing of these points is, under a heading."""
    return _top(points, heading) + TALL + 44.0


def _top(points: Sequence[TradeoffPoint], heading: float) -> float:
    return heading + 42.0 + 18.0 * len(_legend_rows(points))


def draw(
    drawing: Drawing,
    points: Sequence[TradeoffPoint],
    *,
    floor: float,
    leakage: str,
    heading: float = 0.0,
) -> int:
    """Draw points that have both figures, `heading` pixels down; how many names had no room."""
    top = _top(points, heading)
    frame = frame_of(points, floor, Box(LEFT, top, RIGHT, top + TALL))
    _draw_legend(drawing, points, heading)
    frame.y_axis(drawing, accuracy_ticks(frame), "top-1, %")
    frame.x_axis(drawing, leakage_ticks(frame), f"{leakage} (scale changes at the marks)")
    if math.isfinite(floor):
        frame.upright(drawing, floor, dash="1 3", label="floor")
    if frame.x.values[0] < THRESHOLDS[0] < frame.x.values[-1]:
        frame.upright(drawing, THRESHOLDS[0], dash="5 4", label=f"{THRESHOLDS[0]} dB")
    lines = _draw_lines(drawing, frame, points)
    for point in reversed(points):  # the first, often the undefended client, ends on top
        hollow, told = point.unattacked, point.words
        shape, paint = point.kind.shape, point.kind.paint
        drawing.marker(_at(frame, point), shape, paint, hollow=hollow, title=told)
    return _draw_labels(drawing, frame, points, lines)


def _remarks(points: Sequence[TradeoffPoint], floor: float) -> str:
    """What the caption says of these points in particular."""
    text = f" Dotted: what a uniform grey gets, {floor:.1f} dB." if math.isfinite(floor) else ""
    hollow = [point.label for point in points if point.unattacked]
    if hollow:
        text += (
            f" Hollow: no attack of the list applies ({', '.join(hollow)}); it stands at the "
            "floor and is not part of the front."
        )
    lacking = sum(not point.drawable for point in points)
    return text + (f" {lacking} without accuracy or leakage are left out." if lacking else "")


# scales, shared with the PNG ----------------------------------------------------------------------


def frame_of(points: Sequence[TradeoffPoint], floor: float, area: Box) -> Frame:
    """The scales for some points: leakage to the right, accuracy upwards."""
    across = [point.leakage for point in points] + [point.leakage_low for point in points]
    across = [value for value in (*across, floor) if math.isfinite(value)]
    low = max(0.0, math.floor(min(across, default=10.0) - MARGIN))
    across += [point.leakage_high for point in points if math.isfinite(point.leakage_high)]
    highest = min(max([*across, low + 10.0]), PSNR_CAP)
    high = next(float(tick) for tick in LEAKAGE_TICKS if tick >= highest)
    x = stretched(min(low, high - 10.0), high, area.left, area.right, LEAKAGE_ROOM)
    up = [v for p in points for v in (p.accuracy, p.accuracy_low, p.accuracy_high)]
    up = [value for value in up if math.isfinite(value)] or [0.0, 100.0]
    room = max(1.0, 0.06 * (max(up) - min(up)))
    y = Scale((min(up) - room, max(up) + room), (area.bottom, area.top))
    return Frame(area.left, area.top, area.right, area.bottom, x, y)


def leakage_ticks(frame: Frame) -> dict[float, str]:
    """Round values of leakage with room for their texts."""
    shown: dict[float, str] = {}
    last = -math.inf
    for tick in LEAKAGE_TICKS:
        if frame.x.values[0] <= tick <= frame.x.values[-1] and frame.x.at(tick) - last > 28:
            shown[tick] = str(tick)
            last = frame.x.at(tick)
    return shown


def accuracy_ticks(frame: Frame) -> dict[float, str]:
    """Round percentages."""
    return {tick: f"{tick:g}" for tick in round_ticks(frame.y.values[0], frame.y.values[-1], 7)}


def front_corners(
    points: Sequence[TradeoffPoint], right: float, bottom: float
) -> list[tuple[float, float]]:
    """The Pareto front as steps of (leakage, accuracy), from the axis up and out to the right."""
    front = pareto_front(points)
    corners: list[tuple[float, float]] = []
    height = bottom
    for point in front:
        corners += [(point.leakage, height), (point.leakage, point.accuracy)]
        height = point.accuracy
    return [*corners, (right, height)] if corners else []


# drawing ------------------------------------------------------------------------------------------


def _at(frame: Frame, point: TradeoffPoint) -> tuple[float, float]:
    return frame.at(point.leakage, point.accuracy)


def _draw_lines(drawing: Drawing, frame: Frame, points: Sequence[TradeoffPoint]) -> list[Segment]:
    """The front, the lines of strength and the intervals, all behind the points.

    Returns those that labels should keep away from: front and lines of strength.
    """
    drawn: list[list[tuple[float, float]]] = []
    corners = front_corners(points, frame.x.values[-1], frame.y.values[0])
    if corners:
        steps = [frame.at(x, y) for x, y in corners]
        drawing.path(steps, INK, width=1.3, opacity=0.6, title="Pareto front")
        drawn.append(steps)
    for point in points:
        look = {"width": 1, "opacity": 0.35}
        for ends in _intervals(point):
            drawing.path([frame.at(x, y) for x, y in ends], point.kind.paint, **look)
    for family in strength_lines(points):
        ends = [_at(frame, point) for point in family]
        drawing.path(ends, family[0].kind.paint, width=1.6, opacity=0.8)
        drawn.append(ends)
    return [pair for path in drawn for pair in itertools.pairwise(path)]


def _intervals(point: TradeoffPoint) -> list[list[tuple[float, float]]]:
    """The ends of its intervals, as far as they are known."""
    across = [(value, point.accuracy) for value in (point.leakage_low, point.leakage_high)]
    upright = [(point.leakage, value) for value in (point.accuracy_low, point.accuracy_high)]
    return [ends for ends in (across, upright) if all(map(math.isfinite, sum(ends, ())))]


def _draw_labels(
    drawing: Drawing, frame: Frame, points: Sequence[TradeoffPoint], lines: Sequence[Segment]
) -> int:
    """Names of the points with leaders; how many had no room."""
    texts = [fit(point.label, LONGEST, SIZE) for point in points]
    anchors = [
        Anchor(*_at(frame, point), text_width(text, SIZE) + 2 * PAD, SIZE * 1.25)
        for point, text in zip(points, texts, strict=True)
    ]
    area = Box(frame.left + 2, frame.top, WIDTH, frame.bottom - 8)
    boxes = place(anchors, area, lines=lines)
    for point, text, anchor, box in zip(points, texts, anchors, boxes, strict=True):
        if box is None:
            continue
        if anchor.needs_leader(box):
            drawing.path(list(anchor.leader(box)), MUTED, width=0.8, opacity=0.8)
        drawing.text((box.left + PAD, box.bottom - 4), text, full=point.label, halo=True)
    return sum(box is None for box in boxes)


def _legend_rows(points: Sequence[TradeoffPoint]) -> list[list[tuple[float, str]]]:
    """Families that occur, as (place, name) in rows."""
    names = {point.kind.name for point in points}
    rows: list[list[tuple[float, str]]] = [[]]
    across = 0.0
    for name in FAMILIES:
        if name in names:
            wide = text_width(name, SIZE) + 34
            if across + wide > WIDTH:
                rows.append([])
                across = 0.0
            rows[-1].append((across, name))
            across += wide
    return rows


def _draw_legend(drawing: Drawing, points: Sequence[TradeoffPoint], heading: float) -> None:
    for number, row in enumerate(_legend_rows(points)):
        y = heading + 8.0 + 18.0 * number
        for across, name in row:
            family = FAMILIES[name]
            drawing.marker((across + 7, y), family.shape, family.paint)
            drawing.text((across + 18, y + 4), name)
