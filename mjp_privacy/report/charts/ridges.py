"""One ridge for each line: the density of PSNR, its quartiles, and how many images are exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.charts.axes import STRETCH_NOTE, Frame, psnr_scale, psnr_ticks
from mjp_privacy.report.charts.chart import Chart
from mjp_privacy.report.charts.labels import fit
from mjp_privacy.report.charts.svg import INK, MUTED, RULE, SIZE, Drawing, Scale
from mjp_privacy.report.lines import Line, summary

TITLE = "Where the PSNR of the pictures lies"
LEFT, RIGHT, EXACT_LEFT, EXACT_RIGHT = 226.0, 566.0, 586.0, 630.0
TOP, STEP, TALL = 40.0, 46.0, 34.0  # of the first row, from row to row, of the tallest ridge
POINTS = 160
MOST_TICKS = 100  # images that get a tick each under their ridge
SMALLEST_BANDWIDTH = 2.0  # pixels
MOST_KERNELS = 5_000  # of more images those within a tenth of a pixel share a kernel

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ridge:
    """What one row shows; values are PSNR (standard) capped at 100 dB."""

    name: str
    values: Floats  # of all scored images
    inexact: Floats  # of those that are not exact in 8 bits
    exact: int | None  # None where it was not counted
    tried: int
    floor: float

    @property
    def n_text(self) -> str:
        """How many images, and how many of them have no reconstruction."""
        lost = self.tried - len(self.values)
        return f"n={len(self.values)}" + (f", {lost} not recovered" if lost else "")


def ridges_chart(rows: Sequence[tuple[Ridge, str]], left_out: str = "") -> Chart:
    """Ridges with scores and their paints, one under another."""
    caption = (
        "Density of PSNR (standard, capped at 100 dB) over the images that are not exact, each "
        "ridge to its own height. Dot: median; bar: quartiles; ticks, where they are few: images; "
        "all three with exact images. Right: pictures equal to the original in every 8-bit value. "
        "Dotted: mean of a uniform grey." + left_out
    )
    bottom = TOP + STEP * len(rows)
    x = psnr_scale(LEFT, RIGHT)
    frame = Frame(LEFT, TOP, RIGHT, bottom, x, Scale((0.0, 1.0), (bottom, TOP)))
    drawing = Drawing(bottom + 44, TITLE, caption)
    for tick in psnr_ticks(x):
        drawing.line((x.at(tick), TOP), (x.at(tick), bottom), RULE, width=0.6)
    frame.x_axis(drawing, psnr_ticks(x), f"PSNR, dB ({STRETCH_NOTE})")
    if any(row.exact is not None for row, _ in rows):
        drawing.text((EXACT_LEFT, TOP - 12), "exact pictures")
    for number, (row, paint) in enumerate(rows, 1):
        _draw(drawing, x, row, TOP + STEP * number - 4, paint)
    return Chart("spread", TITLE, caption, drawing.render())


def ridge_of(line: Line, name: str) -> Ridge:
    """The figures of a line's row."""
    values = line.scored("psnr", "standard").clip(upper=PSNR_CAP)
    in_8_bits = line.scored("psnr", "paper")
    same = in_8_bits.index[np.isposinf(in_8_bits.to_numpy(dtype=float))]
    exact = values.index.isin(same)
    grey = line.scored("grey_psnr", "diagnostic").clip(upper=PSNR_CAP)
    counts = summary(line, "psnr", "standard", interval=False).counts
    return Ridge(
        name=name,
        values=values.to_numpy(dtype=float),
        inexact=values.to_numpy(dtype=float)[~exact],
        exact=int(exact.sum()) if len(in_8_bits) else None,
        tried=counts.ok + counts.failed + counts.unsupported,
        floor=float(grey.mean()) if len(grey) else math.nan,
    )


def _draw(drawing: Drawing, x: Scale, row: Ridge, base: float, paint: str) -> None:
    drawing.text((0, base - 12), fit(row.name, LEFT - 14, SIZE), full=row.name)
    drawing.text((0, base + 2), fit(row.n_text, LEFT - 14, SIZE), paint=MUTED, full=row.n_text)
    drawing.line((LEFT, base), (RIGHT, base), RULE)
    outline = density(_along(x, row.inexact), LEFT, RIGHT)
    points = [(float(at), base - TALL * float(height)) for at, height in outline]
    if points:
        drawing.area([(points[0][0], base), *points, (points[-1][0], base)], paint, 0.3)
        drawing.path(points, paint, width=1.3)
    if len(row.values) <= MOST_TICKS:
        for value in row.values:
            drawing.line((x.at(value), base + 2), (x.at(value), base + 7), paint, opacity=0.7)
    if not math.isnan(row.floor):
        at = x.at(row.floor)
        drawing.path([(at, base - TALL), (at, base)], INK, width=1.4, dash="1 3")
    low, middle, high = (x.at(q) for q in np.quantile(row.values, [0.25, 0.5, 0.75]))
    told = f"{row.name}: median {float(np.median(row.values)):.1f} dB, {row.n_text}"
    drawing.path([(low, base), (high, base)], INK, width=3, opacity=0.8)
    drawing.marker((middle, base), "circle", INK, radius=4, title=told)
    _draw_exact(drawing, row, base, paint)


def _draw_exact(drawing: Drawing, row: Ridge, base: float, paint: str) -> None:
    """A bar as high as the share of exact pictures, and their number."""
    if row.exact is None or not row.tried:
        return
    outer = [(EXACT_LEFT, base), (EXACT_LEFT, base - TALL), (EXACT_RIGHT, base - TALL)]
    drawing.path([*outer, (EXACT_RIGHT, base), (EXACT_LEFT, base)], RULE, width=0.8)
    top = base - TALL * row.exact / row.tried
    if row.exact:
        right, left = (EXACT_RIGHT, top), (EXACT_LEFT, top)
        drawing.area([(EXACT_LEFT, base), left, right, (EXACT_RIGHT, base)], paint, 0.75)
    drawing.text((EXACT_RIGHT + 8, base - 10), f"{row.exact} of {row.tried}")


def density(places: Floats, left: float, right: float) -> Floats:
    """(m, 2): places along the axis and the density there, its peak 1; empty for no places.

    A Gaussian kernel along the axis as it is drawn, with 0.7 / 0.9 of Silverman's bandwidth; what
    would lie beyond an end is reflected into the plot.
    """
    if not len(places):
        return np.empty((0, 2))
    spread = min(
        float(np.std(places)), float(np.subtract(*np.quantile(places, [0.75, 0.25])) / 1.34)
    )
    spread = spread or float(np.std(places))
    bandwidth = max(0.7 * spread * len(places) ** -0.2, SMALLEST_BANDWIDTH)
    grid = np.linspace(left, right, POINTS)
    near = np.sort(np.append(grid, places[:: max(1, len(places) // POINTS)]))  # narrow peaks show
    ends = float(places.min()) - 3 * bandwidth, float(places.max()) + 3 * bandwidth
    near = near[(near >= ends[0]) & (near <= ends[1])]
    mirrored = np.concatenate([places, 2 * left - places, 2 * right - places])
    if len(places) > MOST_KERNELS:
        mirrored, times = _gathered(mirrored)
        heights = _kernels(near, mirrored, bandwidth) @ times
    else:
        heights = _kernels(near, mirrored, bandwidth).sum(axis=1)
    return np.column_stack([near, heights / heights.max()])


def _kernels(near: Floats, centres: Floats, bandwidth: float) -> Floats:
    """(m, n) each centre's kernel at each place."""
    distances = (near[:, None] - centres[None, :]) / bandwidth
    return np.asarray(np.exp(-0.5 * distances**2))


def _gathered(places: Floats) -> tuple[Floats, Floats]:
    """Places a tenth of a pixel apart with how many lie near each: a kernel is 20 times wider."""
    cells, times = np.unique(np.rint(places * 10), return_counts=True)
    return cells / 10, times.astype(np.float64)


def _along(x: Scale, values: Floats) -> Floats:
    """Where the values lie along an axis."""
    return np.asarray(np.interp(values, x.values, x.pixels))
