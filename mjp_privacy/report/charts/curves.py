"""Shares of images over thresholds, with bands: what the curves of the distributions show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.metrics.success_curve import success_curve
from mjp_privacy.report.lines import Line

MOST_STEPS = 240
"""A curve of more images is drawn at this many thresholds, where its shares are true as well."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A share of images, 0 to 1, from each place on to the next, with its 95 % band."""

    places: Floats
    shares: Floats
    low: Floats  # NaN where the band is not known
    high: Floats
    n: int  # images tried: those without a reconstruction are among them
    photographs: int | None  # of which they were cut, where several were cut from one

    @property
    def area(self) -> float:
        """The area above it up to its last place, negative: the larger, the higher the curve."""
        return -float(np.sum((1 - self.shares[:-1]) * np.diff(self.places)))


def success(line: Line) -> Curve | None:
    """The share of images that reach each PSNR of 0 to 100 dB; None where none was tried.

    Images that the attack failed on or does not support count as not recovered; images that could
    not be scored are left out.
    """
    values = _finite(line, "psnr")
    # right behind a value the share is smaller: a step stands at the value and at its successor
    behind = np.nextafter(values, np.inf)
    places = np.append(0.0, behind[(behind > 0) & (behind < PSNR_CAP)])
    return _curve(line, "psnr", np.append(_thinned(places), PSNR_CAP), higher=True)


def ecdf(line: Line, metric: str, *, smaller: bool) -> Curve | None:
    """The share of images whose score is at most (`smaller`) or at least each value."""
    values = _finite(line, metric)
    if not len(values):
        return None
    steps = values if smaller else np.nextafter(values, np.inf)
    places = _thinned(np.append(steps, min(0.0, float(values.min()))))
    return _curve(line, metric, places, higher=not smaller)


def _finite(line: Line, metric: str) -> Floats:
    values = line.scored(metric, "standard").to_numpy(dtype=float)
    return values[np.isfinite(values)]


def _thinned(places: Floats) -> Floats:
    """Sorted, each once, MOST_STEPS at most; the first and the last are kept."""
    places = np.unique(places)
    if len(places) <= MOST_STEPS:
        return places
    return places[np.unique(np.linspace(0, len(places) - 1, MOST_STEPS).round().astype(int))]


def _curve(line: Line, metric: str, places: Floats, *, higher: bool) -> Curve | None:
    column = line.column(metric, "standard")
    photographs = line.photographs
    curve = success_curve(
        column.values,
        column.statuses,
        places,
        groups=None if photographs is None else photographs[column.at],
        higher=higher,
    )
    if not curve.of:
        return None
    shares, low, high = (percent / 100 for percent in (curve.share, curve.low, curve.high))
    return Curve(places, shares, low, high, curve.of, curve.photographs)
