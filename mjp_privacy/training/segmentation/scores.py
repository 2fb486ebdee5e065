"""mIoU, mAcc and aAcc, as MMSegmentation defines them, and intervals of these over pictures.

All three come from pixel counts of each class, summed over the pictures before anything is divided:

    IoU   right / (truth + predicted − right); its mean is over classes that are in truth or answer
    Acc   right / truth; its mean is over classes that are in the truth
    aAcc  right pixels / labelled pixels

Pixels without a label are left out, whatever is predicted there. A mean over nothing is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.metrics.draws import draws
from mjp_privacy.metrics.statistics import LEVEL, RESAMPLES, SEED

MEASURES = ("miou", "macc", "aacc")
Counts = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """One of the measures in percent, or a difference in points, with its 95 % bootstrap interval
    over pictures."""

    percent: float
    low: float
    high: float


def areas(answer: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(3, K) pixel counts of each class: right, in the truth, in the answer.

    answer: (H, W) classes; labels: (H, W), 0 where a pixel has no label, else 1 + its class
    """
    labelled = labels > 0
    truth, said = labels[labelled].long() - 1, answer[labelled]
    counted = (truth[truth == said], truth, said)
    return torch.stack([torch.bincount(one, minlength=classes) for one in counted])


def measured(counts: Counts) -> Counts:
    """(…, 3): mIoU, mAcc and aAcc in percent of pixel counts (…, 3, K)."""
    right, truth, said = np.moveaxis(counts, -2, 0)
    total = truth.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        overall = right.sum(-1) / total
    of_classes = (_mean(right, truth + said - right), _mean(right, truth), overall)
    return 100 * np.stack(of_classes, -1)


def scored(counts: Counts) -> dict[str, Score]:
    """The measures of pictures whose counts are (n, 3, K), with intervals; NaN without two."""
    return _with_interval(measured(counts.sum(0)), _resampled(counts))


def difference(counts: Counts, others: Counts) -> dict[str, Score]:
    """How much higher one model's measures are than another's on the same pictures, in points; both
    are resampled together."""
    values = measured(counts.sum(0)) - measured(others.sum(0))
    return _with_interval(values, _resampled(counts) - _resampled(others))


def _resampled(counts: Counts) -> Counts:
    """The measures of each resample of the pictures, (resamples, 3); NaN without two pictures."""
    if len(counts) < 2 or not counts.any():
        return np.full((1, len(MEASURES)), np.nan)
    flat = counts.reshape(len(counts), -1)
    return np.concatenate(
        [
            measured((times.astype(np.float64) @ flat).reshape(-1, *counts.shape[1:]))
            for times in draws(len(counts), RESAMPLES, SEED)
        ]
    )


def _with_interval(values: Counts, resampled: Counts) -> dict[str, Score]:
    known = resampled[~np.isnan(resampled).any(-1)]  # not those without a labelled pixel
    low, high = np.full((2, len(MEASURES)), np.nan)
    if len(known):
        low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    triples = zip(values.tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: Score(*triple) for name, triple in zip(MEASURES, triples, strict=True)}


def _mean(parts: Counts, wholes: Counts) -> Counts:
    """The mean of the shares of classes whose whole is not 0; NaN where there is none."""
    shares = np.divide(parts, wholes, out=np.zeros_like(parts), where=wholes > 0)
    number = (wholes > 0).sum(-1)
    with np.errstate(invalid="ignore"):
        mean: Counts = shares.sum(-1) / number
    return mean
