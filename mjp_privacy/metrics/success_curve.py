"""The share of images recovered, for every threshold from which an image counts as recovered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.metrics.coded import Coded
from mjp_privacy.metrics.shares import independent_trials, wilson
from mjp_privacy.metrics.statistics import Floats

DECIBELS: Floats = np.linspace(0.0, 100.0, 101, dtype=np.float64)


@dataclass(frozen=True)
class SuccessCurve:
    """Percent of images recovered at each threshold, with a 95 % band for each point alone."""

    thresholds: Floats
    share: Floats
    low: Floats
    high: Floats
    of: int  # images that the attacker was given
    photographs: int | None  # of which the images were cut; None: each is one of its own


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
    out. The band is Wilson's; with `groups`, the photograph of each image, it is over as many
    trials as `independent_trials` says.

        success_curve([12.0, inf, nan], ["ok", "ok", "failed"], [10, 20]).share  # [66.7, 33.3]
    """
    array, limits = np.asarray(values, dtype=np.float64), np.asarray(thresholds, dtype=np.float64)
    if not len(array) == len(statuses) == len(array if groups is None else groups):
        raise ValueError("values, statuses and groups must have one entry per image")
    states = Coded.of(statuses)
    tried = ~states.equal("unscored")
    scores = np.where(states.equal("ok"), array, np.nan)[tried]
    photographs, trials = None, float(len(scores))
    if groups is not None:
        names = Coded.of(groups)[tried]
        photographs, trials = len(names.counts()), independent_trials(names)
    count = _counted(scores, limits, higher)
    share = count / len(scores) if len(scores) else np.full(len(limits), np.nan)
    low, high = np.array([wilson(part, trials) for part in share.tolist()]).reshape(-1, 2).T
    return SuccessCurve(limits, 100 * share, 100 * low, 100 * high, len(scores), photographs)


def _counted(scores: Floats, limits: Floats, higher: bool) -> NDArray[np.int64]:
    """How many scores reach each limit; a NaN reaches none."""
    ascending = np.sort(scores[~np.isnan(scores)])
    if higher:
        return np.asarray(len(ascending) - np.searchsorted(ascending, limits, "left"))
    return np.asarray(np.searchsorted(ascending, limits, "right"))
