"""The scores of the three robustness sets, as their authors define them, each from plain arrays.

AlexNet's errors are in percent, all scores shares from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.core.machine import derive_seed

Floats = NDArray[np.float64]

ALEXNET: Mapping[str, float] = {
    "gaussian_noise": 88.6428,
    "shot_noise": 89.4468,
    "impulse_noise": 92.2640,
    "defocus_blur": 81.9880,
    "glass_blur": 82.6268,
    "motion_blur": 78.5948,
    "zoom_blur": 79.8360,
    "snow": 86.6816,
    "frost": 82.6572,
    "fog": 81.9324,
    "brightness": 56.4592,
    "contrast": 85.3204,
    "elastic_transform": 64.6056,
    "pixelate": 71.7840,
    "jpeg_compression": 60.6500,
}
"""AlexNet's mean error over the five severities on the official files, in percent, as Hendrycks and
Dietterich publish it."""
ALEXNETS_CLASSES = 1000
"""What these are errors among: beside a model with other classes they say nothing."""

BIN = 100
"""Images in a bin of the calibration error, as in the official code."""
RESAMPLES = 500


def accuracy_when_answering(confidence: Floats, correct: Floats) -> float:
    """AURRA: the mean over all k of the accuracy on the k most confident answers.

    Equal confidences count as if their order were drawn: each place gets their mean accuracy.
    """
    order = np.argsort(-confidence, kind="stable")
    ranked = np.asarray(correct, dtype=np.float64)[order]
    _, first, size = np.unique(-confidence[order], return_index=True, return_counts=True)
    means = np.add.reduceat(ranked, first) / size
    answered = np.arange(1, len(ranked) + 1)
    return float((np.cumsum(np.repeat(means, size)) / answered).mean())


def rms_calibration(confidence: Floats, correct: Floats) -> float:
    """Root of the mean square of (confidence - accuracy) over bins of 100 images of near
    confidence; what is left over belongs to the last bin.

    The official code leaves the last bin, that of the most confident answers, out of the sum; here
    all bins count.
    """
    order = np.argsort(confidence, kind="stable")
    bins = np.array_split(order, np.arange(1, max(1, len(order) // BIN)) * BIN)
    squares = [
        len(members) * (confidence[members].mean() - correct[members].mean()) ** 2
        for members in bins
    ]
    return float(np.sqrt(sum(squares) / len(order)))


def average_precision(strange: Floats, ordinary: Floats) -> float:
    """AUPR of telling strange images by a score that should be higher for them: Σ ΔR · P over the
    distinct scores from above, which is not interpolated."""
    scores = np.concatenate([strange, ordinary])
    positive = np.concatenate([np.ones(len(strange)), np.zeros(len(ordinary))])
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(positive[order])[last]
    precision = hits / (last + 1)
    recall = hits / len(strange)
    return float((np.diff(recall, prepend=0) * precision).sum())


def resampled_interval(
    score: Callable[..., float], *groups: tuple[Floats, ...], seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval (95 %) of a score of one or more sets of images.

    groups: arrays of one set, with an entry for each image; whole images are drawn, set by set
    """
    rng = np.random.default_rng(derive_seed("robustness interval", seed))
    values = []
    for _ in range(RESAMPLES):
        drawn: list[Floats] = []
        for arrays in groups:
            places = rng.integers(0, len(arrays[0]), len(arrays[0]))
            drawn += [array[places] for array in arrays]
        values.append(score(*drawn))
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
