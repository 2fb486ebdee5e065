"""Rank correlations against SciPy and against the definition of tau-b."""

import math

import numpy as np
import pytest
import scipy.stats
from numpy.typing import NDArray

from mjp_privacy.metrics.comparisons import rank_agreement

Floats = NDArray[np.float64]


def scores(n: int = 40) -> dict[str, Floats]:
    """PSNR with exact images and ties, an SSIM and an LPIPS that roughly follow it."""
    generator = np.random.default_rng(0)
    psnr = np.round(generator.normal(25, 6, n))
    psnr[:4] = math.inf
    quality = np.minimum(psnr, 60) + generator.normal(0, 5, n)
    return {
        "psnr": psnr,
        "ssim": quality / 60,
        "lpips": 1 - quality / 60 + generator.normal(0, 0.1, n),
        "mse": 10 ** (-psnr / 10),
    }


def tau_b(a: Floats, b: Floats) -> float:
    """Concordant minus discordant pairs, over the root of the pairs not tied in either."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    signs = [
        (float(a[i] > a[j]) - float(a[i] < a[j]), float(b[i] > b[j]) - float(b[i] < b[j]))
        for i, j in pairs
    ]
    untied = sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs)
    return sum(x * y for x, y in signs) / math.sqrt(untied)


def test_correlations_are_scipys_after_turning() -> None:
    known = scores()
    turned = {
        name: values if name in ("psnr", "ssim") else -values for name, values in known.items()
    }
    agreement = rank_agreement(known)
    assert (agreement.metrics, agreement.n) == (("psnr", "ssim", "lpips", "mse"), 40)
    for i, a in enumerate(turned.values()):
        for j, b in enumerate(turned.values()):
            assert agreement.spearman[i, j] == pytest.approx(scipy.stats.spearmanr(a, b).statistic)
            assert agreement.kendall[i, j] == pytest.approx(tau_b(a, b))


def test_images_without_a_score_are_left_out_everywhere() -> None:
    known = scores()
    known["lpips"][[7, 9]] = math.nan
    kept = {name: np.delete(values, [7, 9]) for name, values in known.items()}
    with_gaps, without = rank_agreement(known), rank_agreement(kept)
    assert with_gaps.n == without.n == 38
    assert with_gaps.spearman == pytest.approx(without.spearman)


def test_a_metric_that_is_always_the_same_has_no_order() -> None:
    agreement = rank_agreement({"psnr": [1.0, 2.0, 3.0], "fft2d": [0.5] * 3})
    assert math.isnan(agreement.spearman[0, 1])
    assert math.isnan(agreement.kendall[1, 0])
    assert agreement.spearman[0, 0] == pytest.approx(1)
