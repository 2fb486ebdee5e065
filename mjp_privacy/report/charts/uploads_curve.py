"""PSNR against the number of uploads of the same image, a curve for each γ: one chart a panel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.charts.axes import EndLabel, Frame, end_labels
from mjp_privacy.report.charts.chart import Chart
from mjp_privacy.report.charts.svg import MUTED, SHAPES, Drawing, Scale, dash, shade

STATISTICS = {"psnr_median": "median", "psnr_mean": "mean"}
PLOTS = ((44.0, 270.0), (412.0, 638.0))  # left and right of the two plots
ROOM = 82.0  # beside a plot, for the labels of its curves
TOP, BOTTOM = 40.0, 290.0


def uploads_charts(points: pd.DataFrame) -> tuple[Chart, ...]:
    """A chart for each panel of what `report.rounds.curve_points` returns; none for no points.

    Panels with two numbers of uploads are drawn only where no panel has more.
    """
    if points.empty:
        return ()
    panels = [panel for _, panel in points.groupby("panel", sort=True)]
    curves = [panel for panel in panels if panel["uploads"].nunique() > 2] or panels
    left_out = len(panels) - len(curves)
    charts = [_chart(panel, number) for number, panel in enumerate(curves, 1)]
    if left_out:
        told = f" {left_out} more, with two numbers of uploads each: see rounds.csv."
        charts[-1] = replace(charts[-1], caption=charts[-1].caption + told)
    return tuple(charts)


def _chart(panel: pd.DataFrame, number: int) -> Chart:
    title = f"More uploads of the same picture: {_client(panel)}"
    caption = (
        "PSNR (standard, capped at 100 dB) against the number of uploads of the same image, a "
        "curve for each γ: median on the left, mean on the right. Bands: 95 % bootstrap "
        f"intervals. Images: {_images(panel)}." + _floor_words(panel)
    )
    drawing = Drawing(BOTTOM + 44, title, caption)
    for (column, name), (left, right) in zip(STATISTICS.items(), PLOTS, strict=True):
        _plot(drawing, panel, column, name, left, right)
    return Chart(f"uploads_{number}", title, caption, drawing.render())


def _client(panel: pd.DataFrame) -> str:
    first = panel.iloc[0]
    details = [str(first[key]) for key in ("differs", "options") if first[key]]
    target = f"{first['model']} ({first['setting']}), {first['dtype']}"
    return ", ".join([target, str(first["attack"]), *details])


def _images(panel: pd.DataFrame) -> str:
    low, high = int(panel["n"].min()), int(panel["n"].max())
    return str(low) if low == high else f"{low} to {high}, by the number of uploads"


def _floor_words(panel: pd.DataFrame) -> str:
    floor = _floor(panel)
    return "" if math.isnan(floor) else f" Dotted: mean of a uniform grey, {floor:.1f} dB."


def _floor(panel: pd.DataFrame) -> float:
    return float(panel["grey_mean"].clip(upper=PSNR_CAP).mean())


def _plot(
    drawing: Drawing, panel: pd.DataFrame, column: str, name: str, left: float, right: float
) -> None:
    frame = _frame(panel, left, right)
    ticks = {float(value): str(value) for value in (0, 20, 40, 60, 80, 100)}
    frame.y_axis(drawing, ticks, f"{name} PSNR, dB")
    shown = _spaced(sorted(panel["uploads"].unique()), frame)
    frame.x_axis(drawing, {_place(value): f"{value:g}" for value in shown}, "uploads")
    floor = _floor(panel)
    labels = []
    if not math.isnan(floor):
        ends = [(frame.left, frame.y.at(floor)), (frame.right, frame.y.at(floor))]
        drawing.path(ends, MUTED, width=1.4, dash="1 3")
        labels.append(EndLabel(frame.y.at(floor), "floor", MUTED, "1 3"))
    for index, (gamma, curve) in enumerate(panel.groupby("gamma", sort=True)):
        curve = curve.sort_values("uploads").dropna(subset=[column])
        _draw_curve(drawing, frame, curve, column, index, f"γ {gamma:g}")
        last = curve.tail(1)
        if len(last):
            end = frame.at(_place(last["uploads"].iloc[0]), float(last[column].iloc[0]))
            labels.append(EndLabel(end[1], f"γ {gamma:g}", shade(index), dash(index)))
    end_labels(drawing, frame, labels, left=right + 28, right=right + ROOM)


def _frame(panel: pd.DataFrame, left: float, right: float) -> Frame:
    """From the fewest to the most uploads, each doubling as wide as any other; 0 to 100 dB."""
    low, high = _place(panel["uploads"].min()), _place(panel["uploads"].max())
    if high <= low:
        low, high = low - 1, high + 1
    x = Scale((low, high), (left + 8, right - 8))
    return Frame(left, TOP, right, BOTTOM, x, Scale((0.0, PSNR_CAP), (BOTTOM, TOP)))


def _place(uploads: float) -> float:
    return math.log2(max(1.0, float(uploads)))


def _spaced(uploads: Sequence[float], frame: Frame) -> list[float]:
    """Those with room for their text under the axis, the first and the last among them."""
    shown: list[float] = []
    last = frame.x.at(_place(uploads[-1]))
    for value in uploads[:-1]:
        at = frame.x.at(_place(value))
        if last - at > 20 and (not shown or at - frame.x.at(_place(shown[-1])) > 20):
            shown.append(value)
    return [*shown, uploads[-1]]


def _draw_curve(
    drawing: Drawing, frame: Frame, curve: pd.DataFrame, column: str, index: int, name: str
) -> None:
    places = [_place(value) for value in curve["uploads"]]
    banded = curve.dropna(subset=[f"{column}_lo", f"{column}_hi"])
    if len(banded) > 1:
        across = [_place(value) for value in banded["uploads"]]
        upper = [frame.at(x, y) for x, y in zip(across, banded[f"{column}_hi"], strict=True)]
        lower = [frame.at(x, y) for x, y in zip(across, banded[f"{column}_lo"], strict=True)]
        drawing.area(upper + lower[::-1], shade(index), 0.14)
    values = [min(float(value), PSNR_CAP) for value in curve[column]]
    corners = [frame.at(x, y) for x, y in zip(places, values, strict=True)]
    if len(corners) > 1:
        drawing.path(corners, shade(index), width=1.8, dash=dash(index))
    for corner, uploads, value, n in zip(
        corners, curve["uploads"], values, curve["n"], strict=True
    ):
        told = f"{name}, {uploads:g} uploads: {value:.1f} dB, n={n}"
        drawing.marker(corner, SHAPES[index % len(SHAPES)], shade(index), radius=3.5, title=told)
