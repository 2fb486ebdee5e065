"""The share of images recovered, for every threshold from which an image counts as recovered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.metrics.coded import Coded
from mjp_privacy.metrics.many_groups import resampled_quantiles
from mjp_privacy.metrics.shares import wilson
from mjp_privacy.metrics.statistics import LEVEL, MOST_DRAWN, Floats, resampled_means

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
    statuses: Sequence[str] | Coded,
    thresholds: Sequence[float] | Floats = DECIBELS,
    *,
    groups: Sequence[str] | Coded | None = None,
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
    states = Coded.of(statuses)
    tried = ~states.equal("unscored")
    scores = np.where(states.equal("ok"), array, np.nan)[tried]
    if groups is None:
        count = _counted(scores, limits, higher)
        low, high = _wilson_band(count, len(scores))
        photographs = None
    else:
        names = Coded.of(groups)[tried].present()
        reached = scores[:, None] >= limits if higher else scores[:, None] <= limits
        count = reached.sum(axis=0)
        low, high = _resampled_band(reached, names)
        photographs = len(names.words)
    share = count / len(scores) if len(scores) else np.full(len(limits), np.nan)
    return SuccessCurve(limits, 100 * share, 100 * low, 100 * high, len(scores), photographs)


def _counted(scores: Floats, limits: Floats, higher: bool) -> NDArray[np.int64]:
    """How many scores reach each limit; a NaN reaches none."""
    ascending = np.sort(scores[~np.isnan(scores)])
    if higher:
        return np.asarray(len(ascending) - np.searchsorted(ascending, limits, "left"))
    return np.asarray(np.searchsorted(ascending, limits, "right"))


def _wilson_band(reached: NDArray[np.int64], of: int) -> tuple[Floats, Floats]:
    bounds = [wilson(count / of if of else np.nan, of) for count in reached.tolist()]
    low, high = np.array(bounds, dtype=np.float64).reshape(-1, 2).T
    return low, high


def _resampled_band(reached: NDArray[np.bool_], names: Coded) -> tuple[Floats, Floats]:
    """Percentiles of the share over resampled photographs; NaN for fewer than two.

    Where no image, or every image, is recovered, all resamples agree; there the band is Wilson's
    over as many trials as there are photographs.
    """
    count, of_image = len(names.words), names.codes
    if count < 2:
        unknown = np.full(reached.shape[1], np.nan)
        return unknown, unknown
    hits = np.zeros((count, reached.shape[1]))
    np.add.at(hits, of_image, reached.astype(np.float64))
    sizes = np.bincount(of_image).astype(np.float64)
    tail = (1 - LEVEL) / 2
    if count > MOST_DRAWN:
        low, high = resampled_quantiles(hits, sizes, (tail, 1 - tail))
        low, high = np.maximum(low, 0.0), np.minimum(high, 1.0)
    else:
        low, high = np.quantile(resampled_means(hits, sizes), [tail, 1 - tail], axis=0)
    none, every = ~reached.any(axis=0), reached.all(axis=0)
    high[none] = wilson(0.0, count)[1]
    low[every] = wilson(1.0, count)[0]
    return low, high
