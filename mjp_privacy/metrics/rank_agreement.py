"""Do metrics order the images alike? Rank correlations between metrics over the same images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mjp_privacy.metrics.statistics import Floats

CLOSER = {"psnr": 1, "ssim": 1, "lpips": -1, "mse": -1, "fft2d": -1}
"""The sign with which a higher value of each metric means a better reconstruction."""


@dataclass(frozen=True)
class RankAgreement:
    """Correlations between metrics turned so that higher is a better reconstruction."""

    metrics: tuple[str, ...]
    n: int  # images with a value of every metric
    spearman: Floats  # (k, k); NaN where a metric is the same for every image
    kendall: Floats  # (k, k) tau-b, which allows for equal values


def rank_agreement(scores: Mapping[str, Sequence[float] | Floats]) -> RankAgreement:
    """Spearman's and Kendall's correlations over the images that have every metric.

    `scores` holds one value for each image, in the same order, for metrics of CLOSER.
    An infinite PSNR is a value: the highest.

        rank_agreement({"psnr": [10, 20, 30], "mse": [.1, .01, .001]}).spearman[0, 1]  # 1.0
    """
    names = tuple(scores)
    table = np.array([CLOSER[name] * np.asarray(scores[name], float) for name in names])
    table = table[:, ~np.isnan(table).any(axis=0)]
    spearman, kendall = (np.full((len(names), len(names)), math.nan) for _ in range(2))
    for i in range(len(names)):
        for j in range(i + 1):
            rho, tau = _correlations(table[i], table[j])
            spearman[i, j] = spearman[j, i] = rho
            kendall[i, j] = kendall[j, i] = tau
    return RankAgreement(names, table.shape[1], spearman, kendall)


def _correlations(first: Floats, second: Floats) -> tuple[float, float]:
    """(Spearman, Kendall tau-b); NaN where they are not defined."""
    from scipy.stats import kendalltau, rankdata

    if len(np.unique(first)) < 2 or len(np.unique(second)) < 2:
        return math.nan, math.nan
    rho = np.corrcoef(rankdata(first), rankdata(second))[0, 1]
    return float(rho), float(kendalltau(first, second).statistic)
