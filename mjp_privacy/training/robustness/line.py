"""One figure with its interval, the number of its images and the paper's, where it may stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.metrics.shares import wilson
from mjp_privacy.metrics.statistics import bootstrap_interval

RESAMPLED = "bootstrap over images"


@dataclass(frozen=True)
class Figure:
    """A number in percent with its 95 % interval; `failed` images could not be read."""

    percent: float
    low: float
    high: float
    interval: str  # "Wilson" or RESAMPLED
    n: int
    failed: int = 0

    def times(self, factor: float) -> Figure:
        """The same in another unit."""
        return replace(
            self, percent=factor * self.percent, low=factor * self.low, high=factor * self.high
        )


@dataclass(frozen=True)
class Line:
    """A line of robustness.csv."""

    model: str
    images: str  # "ImageNet-C", "ImageNet-A", "ImageNet-O", or what else was measured
    measure: str
    figure: Figure
    corruption: str = ""
    severity: int | None = None
    paper: float | None = None


def share(hits: NDArray[np.float64]) -> Figure:
    """A share of images: share(array([1.0, 0.0, nan])) is 50 % of two, and counts one as failed."""
    ok = hits[~np.isnan(hits)]
    part = float(ok.mean()) if len(ok) else math.nan
    low, high = wilson(part, len(ok))
    return Figure(100 * part, 100 * low, 100 * high, "Wilson", len(ok), len(hits) - len(ok))


def mean(values: NDArray[np.float64], *, whole: float | None = None) -> Figure:
    """A mean over images of values in percent; images that are NaN are failed.

    whole: the value of an image with nothing but wrong answers. Where all images are there, or all
           at 0, the interval is Wilson's, for the bootstrap's has no width: [0, 49] of four
    """
    ok = values[~np.isnan(values)]
    average = float(ok.mean()) if len(ok) else math.nan
    failed = len(values) - len(ok)
    if whole is not None and len(ok) and (np.all(ok == 0) or np.allclose(ok, whole)):
        low, high = wilson(float(ok[0] > 0), len(ok))
        return Figure(average, whole * low, whole * high, "Wilson", len(ok), failed)
    return Figure(average, *bootstrap_interval(ok), RESAMPLED, len(ok), failed)


def table_of(lines: Sequence[Line]) -> pd.DataFrame:
    """The lines as the table that is written."""
    flat = [{**asdict(line), **asdict(line.figure)} for line in lines]
    return pd.DataFrame(flat).drop(columns="figure").astype({"severity": "Int64"})
