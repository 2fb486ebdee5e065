"""The frame of a plot: ticks, gridlines, labels of axes, and labels at the ends of curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mjp_privacy.report.charts.labels import fit, spread
from mjp_privacy.report.charts.svg import INK, MUTED, RULE, SIZE, Drawing, Scale, stretched

ROW = 15.0  # height of one line of labels

PSNR_ROOM = ((8.0, 0.25), (40.0, 1.0), (100.0, 0.16))
"""Room for a dB below 8, from 8 to 40, and beyond: pictures become readable in the middle."""

PSNR_TICKS = (0, 8, 12, 16, 20, 25, 30, 40, 60, 80, 100)
STRETCH_NOTE = "axis: 8 to 40 dB stretched"


@dataclass(frozen=True)
class Frame:
    """The rectangle of a plot with its two scales."""

    left: float
    top: float
    right: float
    bottom: float
    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The point of two values."""
        return self.x.at(x), self.y.at(y)

    def x_axis(self, drawing: Drawing, ticks: Mapping[float, str], label: str) -> None:
        """Ticks and their texts under the plot, and what the axis shows."""
        drawing.line((self.left, self.bottom), (self.right, self.bottom), MUTED)
        for at in self.x.pixels[1:-1]:  # where the scale changes
            for shift in (-2, 2):
                start = (at + shift - 2, self.bottom + 5)
                drawing.line(start, (at + shift + 2, self.bottom - 5), INK, width=1.2)
        for value, text in ticks.items():
            at = self.x.at(value)
            drawing.line((at, self.bottom), (at, self.bottom + 4), MUTED)
            drawing.text((at, self.bottom + 17), text, anchor="middle", paint=MUTED)
        middle = (self.left + self.right) / 2
        short = fit(label, 2 * min(middle, drawing.width - middle), SIZE)
        drawing.text((middle, self.bottom + 35), short, anchor="middle", full=label)

    def y_axis(self, drawing: Drawing, ticks: Mapping[float, str], label: str) -> None:
        """Gridlines with their texts left of the plot, and what the axis shows above it."""
        for value, text in ticks.items():
            at = self.y.at(value)
            drawing.line((self.left, at), (self.right, at), RULE, width=0.7)
            drawing.text((self.left - 6, at + 4), text, anchor="end", paint=MUTED)
        if label:
            short = fit(label, drawing.width - self.left, SIZE)
            drawing.text((max(0.0, self.left - 40), self.top - 20), short, full=label)

    def upright(self, drawing: Drawing, value: float, *, dash: str, label: str = "") -> None:
        """A vertical line at a value, with its label above the plot."""
        at = self.x.at(value)
        drawing.line((at, self.top), (at, self.bottom), MUTED, width=1, dash=dash)
        if label:
            drawing.text((at, self.top - 4), label, anchor="middle", paint=MUTED)


def psnr_scale(left: float, right: float) -> Scale:
    """0 to 100 dB with most room for 8 to 40."""
    return stretched(0.0, 100.0, left, right, PSNR_ROOM)


def psnr_ticks(scale: Scale) -> dict[float, str]:
    """Round values that stand far enough from one another."""
    return {tick: str(tick) for tick in PSNR_TICKS if scale.values[0] <= tick <= scale.values[-1]}


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between low and high, `most` at most: round_ticks(0, 1) is 0, 0.2, … 1."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(count * step, 12) for count in range(first, last + 1)]


@dataclass(frozen=True)
class EndLabel:
    """What stands beside the end of a curve."""

    y: float
    text: str
    paint: str
    dash: str = ""


def end_labels(
    drawing: Drawing,
    frame: Frame,
    labels: Sequence[EndLabel],
    *,
    left: float,
    right: float,
) -> None:
    """Labels from `left` to `right` beside a plot, tied to the ends of their curves at its edge.

    Labels for equal ends stand in the order given, from top to bottom.
    """
    places = spread([label.y for label in labels], ROW, frame.top, frame.bottom)
    for label, y in zip(labels, places, strict=True):
        tie = [(frame.right + 1, label.y), (left - 24, y), (left - 4, y)]
        drawing.path(tie, label.paint, width=1.6, dash=label.dash, opacity=0.75)
        short = fit(label.text, right - left, SIZE)
        drawing.text((left, y + 4), short, paint=INK, full=label.text)
