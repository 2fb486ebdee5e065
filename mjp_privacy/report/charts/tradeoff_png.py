"""Accuracy against leakage as a PNG: the page's drawing on matplotlib's canvas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.core.drawing import house_style
from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.text import plain
from mjp_privacy.report.charts.svg import INK, MUTED, SIZE, WIDTH, Drawing, marker_outline, resolved
from mjp_privacy.report.charts.tradeoff import draw, height_of
from mjp_privacy.report.charts.tradeoff_points import TradeoffPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS = 1080  # width of the file
SHADES = 128  # colours of the file: few make it small
FOOT = 26.0
INTERVALS = "95 % intervals"
FOOTNOTE = "Steps: Pareto front. Light bars: {}. Hollow: no attack applies. Dotted: uniform grey."
EDGE = 8.0  # white to the left and right
HEADING = 30.0
_DARK_INK = "#1f2933"
_SIDES = {"start": "left", "middle": "center", "end": "right"}


@dataclass
class Plotted(Drawing):
    """A drawing that goes to axes whose data coordinates are its pixels."""

    axes: Axes | None = None

    def path(self, points: Sequence[tuple[float, float]], paint: str, **look: Any) -> None:
        """As in `Drawing`."""
        xs, ys = zip(*points, strict=True)
        style: dict[str, Any] = {"alpha": look.get("opacity", 1)}
        if look.get("dash"):
            style["dashes"] = [float(length) for length in look["dash"].split()]
        self._axes.plot(
            xs, ys, color=_paint(paint), linewidth=_points(look.get("width", 1)), **style
        )

    def area(
        self, points: Sequence[tuple[float, float]], paint: str, opacity: float, title: str = ""
    ) -> None:
        """As in `Drawing`."""
        xs, ys = zip(*points, strict=True)
        self._axes.fill(xs, ys, color=_paint(paint), alpha=opacity, linewidth=0)

    def marker(
        self,
        at: tuple[float, float],
        shape: str,
        paint: str,
        *,
        radius: float = 5.0,
        hollow: bool = False,
        title: str = "",
    ) -> None:
        """As in `Drawing`."""
        xs, ys = zip(*marker_outline(at, shape, radius), strict=True)
        colour = _paint(paint)
        face = "none" if hollow else colour
        self._axes.fill(xs, ys, facecolor=face, edgecolor=colour, linewidth=_points(1.5), zorder=3)

    def text(
        self,
        at: tuple[float, float],
        content: str,
        *,
        anchor: str = "start",
        paint: str = INK,
        size: float = SIZE,
        full: str = "",
        halo: bool = False,
    ) -> None:
        """As in `Drawing`."""
        from matplotlib.patheffects import withStroke

        rim = [withStroke(linewidth=_points(3), foreground="white")] if halo else []
        place: dict[str, Any] = {"ha": _SIDES[anchor], "va": "baseline", "path_effects": rim}
        font: dict[str, Any] = {
            "fontsize": _points(size),
            "color": _paint(paint),
        }
        self._axes.text(at[0], at[1], plain(content), zorder=4, **place, **font)

    @property
    def _axes(self) -> Axes:
        if self.axes is None:
            raise ValueError("a plotted drawing needs axes")
        return self.axes


def _points(pixels: Any) -> float:
    """Pixels of a drawing in points of a figure that has 100 of them to the inch."""
    return 0.72 * float(pixels)


def _paint(paint: str) -> str:
    return resolved(paint).replace("currentColor", _DARK_INK)


@house_style()
def draw_tradeoff(
    panels: Mapping[str, Sequence[TradeoffPoint]],
    path: Path,
    *,
    floors: Mapping[str, float] | None = None,
    bars: str = INTERVALS,
) -> None:
    """Draw panels one under another, each with its heading, and write them as PNG.

        draw_tradeoff({"1 upload": points_from_comparison(table)}, Path("tradeoff.png"))

    floors: PSNR of a uniform grey by heading. bars: what the light bars are.
    """
    from matplotlib.figure import Figure

    shown = {name: [p for p in points if p.drawable] for name, points in panels.items()}
    tops = [0.0]
    for points in shown.values():
        tops.append(tops[-1] + height_of(points, HEADING))
    wide, tall = WIDTH + 2 * EDGE, tops[-1] + FOOT
    figure = Figure(figsize=(wide / 100, tall / 100), dpi=100 * PIXELS / wide)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-EDGE, WIDTH + EDGE), ylim=(tall, 0))
    axes.axis("off")
    drawing = Plotted(tops[-1], "", "", axes=axes)
    for (name, points), top in zip(shown.items(), tops[:-1], strict=True):
        drawing.text((0, top + 18), name, size=14)
        floor = (floors or {}).get(name, math.nan)
        label = "PSNR of the best attack, dB; left is private"
        hidden = draw(drawing, points, floor=floor, leakage=label, heading=top + HEADING)
        if hidden:
            drawing.text((WIDTH, top + 18), f"no room for {hidden} names", anchor="end")
    drawing.text((0, tall - 10), FOOTNOTE.format(bars), paint=MUTED)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG of few colours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    places, colours = _of_few_colours(np.asarray(canvas.buffer_rgba())[..., :3])
    few = Image.fromarray(places)
    few.putpalette(colours.tobytes())
    write_atomically(path, lambda place: few.save(place, format="PNG", optimize=True))


def _of_few_colours(drawn: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """For each pixel the place of its colour, and the colours: those that the picture has most of,
    so that what is filled keeps its own. Any other is the nearest of them."""
    packed = drawn.astype(np.int64) @ np.array([65536, 256, 1])
    values, where, counts = np.unique(packed, return_inverse=True, return_counts=True)
    levels = np.stack([values >> 16, values >> 8 & 255, values & 255], axis=1)
    most = levels[np.argsort(-counts, kind="stable")[:SHADES]]
    nearest = ((levels[:, None] - most) ** 2).sum(axis=2).argmin(axis=1)
    return nearest.astype(np.uint8)[where].reshape(packed.shape), most.astype(np.uint8)
