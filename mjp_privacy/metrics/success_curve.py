"""The share of images recovered, for every threshold from which an image counts as recovered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.metrics.shares import wilson
from mjp_privacy.metrics.statistics import LEVEL, Floats, resampled_means

DECIBELS: Floats = np.linspace(0.0, 100.0, 101, dtype=np.float64)


@dataclass(frozen=True)
class SuccessCurve:
    """Percent of images recovered at each threshold, with a 95 % band for each point alone."""

    thresholds: Floats
    share: Floats
    low: Floats
    high: Floats
    of: int  # images that the attacker was given
    photographs: int | None  # what was resampled for the band; None: Wilson intervals over images


def success_curve(
    values: Sequence[float] | Floats,
    statuses: Sequence[str],
    thresholds: Sequence[float] | Floats = DECIBELS,
    *,
    groups: Sequence[str] | None = None,
    higher: bool = True,
) -> SuccessCurve:
    """The success curve of one metric over one line's images.

    An image counts from `value >= threshold`, or `<=` if not `higher`. Images that failed or are
    unsupported, and `ok` ones whose value is NaN, count as not recovered; unscored ones are left
    out. With `groups`, the photograph of each image, the band comes from resampled photographs.

        success_curve([12.0, inf, nan], ["ok", "ok", "failed"], [10, 20]).share  # [66.7, 33.3]
    """
    array, limits = np.asarray(values, dtype=np.float64), np.asarray(thresholds, dtype=np.float64)
    if not len(array) == len(statuses) == len(array if groups is None else groups):
        raise ValueError("values, statuses and groups must have one entry per image")
    state = np.asarray(statuses, dtype=str)
    tried = state != "unscored"
    scores = np.where(state == "ok", array, np.nan)[tried]
    reached = scores[:, None] >= limits if higher else scores[:, None] <= limits  # NaN: neither
    if groups is None:
        low, high = _wilson_band(reached.sum(axis=0), len(scores))
        photographs = None
    else:
        names = np.asarray(groups, dtype=str)[tried]
        low, high = _resampled_band(reached, names)
        photographs = len(np.unique(names))
    share = reached.mean(axis=0) if len(scores) else np.full(len(limits), np.nan)
    return SuccessCurve(limits, 100 * share, 100 * low, 100 * high, len(scores), photographs)


def _wilson_band(reached: NDArray[np.int64], of: int) -> tuple[Floats, Floats]:
    bounds = [wilson(count / of if of else np.nan, of) for count in reached.tolist()]
    low, high = np.array(bounds, dtype=np.float64).reshape(-1, 2).T
    return low, high


def _resampled_band(reached: NDArray[np.bool_], names: NDArray[np.str_]) -> tuple[Floats, Floats]:
    """Percentiles of the share over resampled photographs; NaN for fewer than two.

    Where no image, or every image, is recovered, all resamples agree; there the band is Wilson's
    over as many trials as there are photographs.
    """
    photographs, of_image = np.unique(names, return_inverse=True)
    count = len(photographs)
    if count < 2:
        unknown = np.full(reached.shape[1], np.nan)
        return unknown, unknown
    hits = np.zeros((count, reached.shape[1]))
    np.add.at(hits, of_image, reached.astype(np.float64))
    shares = resampled_means(hits, np.bincount(of_image).astype(np.float64))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(shares, [tail, 1 - tail], axis=0)
    none, every = ~reached.any(axis=0), reached.all(axis=0)
    high[none] = wilson(0.0, count)[1]
    low[every] = wilson(1.0, count)[0]
    return low, high
