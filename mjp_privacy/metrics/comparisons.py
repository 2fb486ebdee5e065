"""Is one score higher than another on the same images? Two tests, an effect and an interval.

Both tests ask whether the signs of the differences could be chance. Wilcoxon's signed-rank test
looks at the ranks of the differences; the sign-flip test at their mean. Images of one photograph
are averaged first, so that a photograph counts once however many crops of it there are; the mean
difference alone is over images, for it is the difference of the two means that tables print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mjp_privacy.metrics.statistics import (
    ENTRIES_AT_ONCE,
    PSNR_CAP,
    SEED,
    Floats,
    bootstrap_interval,
    group_sums,
)

FLIPS = 10_000
ENUMERATED = 12  # pairs that differ, up to which every choice of signs is tried
EXACT_RANKS = 50  # pairs that differ, up to which Wilcoxon's distribution is computed exactly


@dataclass(frozen=True)
class PairedTest:
    """Comparison of two scores of the same images; differences are first - second."""

    images: int
    n: int  # pairs: photographs where images of one were averaged, else images
    differing: int  # pairs that are not equal
    median: float
    mean: float  # over images
    low: float  # of the mean's 95 % bootstrap interval over photographs; NaN for fewer than two
    high: float
    effect: float  # matched-pairs rank-biserial correlation: 1 where every pair is higher
    p: float  # Wilcoxon, two-sided
    p_flips: float  # sign flips of the mean, two-sided
    smallest_p_flips: float  # the smallest p that the sign flips can give


def paired_test(
    first: Sequence[float] | Floats,
    second: Sequence[float] | Floats,
    *,
    groups: Sequence[str] | None = None,
    cap: float = PSNR_CAP,
) -> PairedTest:
    """Compare two scores of the same images, in the same order.

    Scores are taken as min(score, cap), so that two exact images (PSNR inf) differ by zero.
    `groups` names the photograph of each image. Without images everything is NaN.

        paired_test([30.0, inf, 25.0], [20.0, inf, 24.0]).mean  # 3.67
    """
    a, b = (np.minimum(np.asarray(side, dtype=np.float64), cap) for side in (first, second))
    if not len(a) == len(b) == len(a if groups is None else groups):
        raise ValueError("first, second and groups must have one entry per image")
    of_images: Floats = a - b
    if not np.isfinite(of_images).all():
        raise ValueError("scores must be finite after the cap: leave out images without a score")
    sums, sizes = group_sums(of_images, groups)
    differences = sums / sizes
    n = len(differences)
    if not n:
        nan = math.nan
        return PairedTest(0, 0, 0, nan, nan, nan, nan, nan, nan, nan, nan)
    # Ranks of the absolute differences with their signs; equal ones share the mean rank. Pairs
    # without a difference take part in the ranking and then count 0 (Pratt's rule).
    _, of_pair, counts = np.unique(np.abs(differences), return_inverse=True, return_counts=True)
    shared = np.cumsum(counts) - (counts - 1) / 2
    ranks = np.sign(differences) * shared[of_pair.reshape(n)]
    low, high = bootstrap_interval(of_images, groups)
    p_flips, smallest = sign_flip_test(differences)
    return PairedTest(
        images=len(of_images),
        n=n,
        differing=int((differences != 0).sum()),
        median=float(np.median(differences)),
        mean=float(of_images.mean()),
        low=low,
        high=high,
        effect=float(ranks.sum() / (n * (n + 1) / 2)),
        p=wilcoxon_p(ranks),
        p_flips=p_flips,
        smallest_p_flips=smallest,
    )


def wilcoxon_p(ranks: Floats) -> float:
    """Two-sided p of Wilcoxon's test from signed ranks (Pratt's rule for zeros, ties as they are).

    Up to 50 differing pairs the distribution is exact, for the very ranks that occurred; beyond,
    normal with the variance of these ranks, without continuity correction. 1 without differences.
    """
    nonzero = np.abs(ranks[ranks != 0])
    if not len(nonzero):
        return 1.0
    above = float(ranks[ranks > 0].sum())
    if len(nonzero) > EXACT_RANKS:
        z = (above - nonzero.sum() / 2) / math.sqrt((nonzero**2).sum() / 4)
        return math.erfc(abs(z) / math.sqrt(2))
    # The chance of each sum where every rank is taken with probability 1/2; mean ranks may end in
    # .5, so that sums are counted in halves.
    doubled = np.rint(2 * nonzero).astype(np.int64)
    chances = np.zeros(int(doubled.sum()) + 1)
    chances[0] = 1.0
    for rank in doubled:
        chances *= 0.5
        chances[rank:] += chances[: len(chances) - rank]
    at = round(2 * above)
    return min(1.0, 2 * float(min(chances[: at + 1].sum(), chances[at:].sum())))


def sign_flip_test(differences: Floats) -> tuple[float, float]:
    """(p, the smallest p it can give) of the two-sided permutation test of the mean.

    Up to 12 differing pairs every choice of signs is tried; beyond, 10,000 random ones, and
    p = (1 + those with a mean as far from 0) / 10,001.
    """
    moved = differences[differences != 0]
    count = len(moved)
    if not count:
        return 1.0, 1.0
    if count <= ENUMERATED:
        choices = np.arange(2**count)[:, None] >> np.arange(count) & 1
        sums = (2 * choices - 1) @ moved
    else:
        width = (count + 7) // 8  # a bit for each pair
        packed = np.random.default_rng(SEED).integers(0, 256, (FLIPS, width), dtype=np.uint8)
        rows = min(512, 1 + 16 * ENTRIES_AT_ONCE // count)
        blocks = (packed[at : at + rows] for at in range(0, FLIPS, rows))
        bits = (np.unpackbits(block, axis=1, count=count).astype(np.float64) for block in blocks)
        sums = 2 * np.concatenate([some @ moved for some in bits]) - moved.sum()
    observed = abs(float(moved.sum()))
    extreme = int((np.abs(sums) >= observed * (1 - 1e-12)).sum())
    if count <= ENUMERATED:
        return extreme / len(sums), 2 / len(sums)
    return (1 + extreme) / (1 + FLIPS), 1 / (1 + FLIPS)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for how many tests there are (Holm 1979); NaN is no test and stays.

    holm([0.01, 0.04, 0.03])  # [0.03, 0.06, 0.06]
    """
    order = sorted((p, at) for at, p in enumerate(p_values) if not math.isnan(p))
    adjusted = list(map(float, p_values))
    largest = 0.0
    for rank, (p, at) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[at] = largest
    return adjusted
