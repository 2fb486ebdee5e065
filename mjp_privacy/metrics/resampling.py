"""How often each resample of a bootstrap holds each group: drawn once, kept for further ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 18  # entries of the matrix of draws held as floating point at a time (2 MiB)

Draws = NDArray[np.uint16]


@lru_cache(maxsize=8)  # 8 MB each, of up to 2048 groups
def draws(count: int, resamples: int, seed: int) -> list[Draws]:
    """Blocks of the (resamples, count) matrix of how often each resample holds each group."""
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // count)
    blocks: list[Draws] = []
    for start in range(0, resamples, rows):
        shape = (min(rows, resamples - start), count)
        drawn = generator.integers(0, count, size=shape)
        drawn += count * np.arange(shape[0])[:, None]
        times = np.bincount(drawn.ravel(), minlength=shape[0] * count)
        blocks.append(times.reshape(shape).astype(np.uint16))
    return blocks


# ------------------------------------------------------------------------------------------------
# Sums of thousands of terms, without drawing every term.
#
# Where no term is far larger than the others, what a resample or a choice of signs adds up to is
# nearly normal. Where a few are, these few are drawn one by one, and the rest together as one
# normal number: 10 draws a resample in place of 50,000.

Floats = NDArray[np.float64]

_SHARE = 1 / 100
"""Of all squares. A term whose square is more is far larger than the rest."""

_NEGLIGIBLE = 1e-4
"""Of all squares. A rest that holds no more moves no end, however it is distributed."""


def far_larger(deviations: Floats) -> NDArray[np.bool_]:
    """Which terms are so much larger than the rest that a sum of all is no normal one.

    The largest are set aside until the square of the next is at most a hundredth of the squares
    that are left, or until these are negligible: never more than 917 terms, for each takes more
    than a hundredth.

        far_larger([9, 1, -1, ...])  # [True, False, False, ...] with two hundred ones
    """
    squares = np.square(deviations)
    order = np.argsort(-squares)
    left = np.cumsum(squares[order][::-1])[::-1]  # each with all that are smaller
    settled = (squares[order] <= left * _SHARE) | (left <= squares.sum() * _NEGLIGIBLE)
    larger = np.zeros(len(squares), dtype=bool)
    larger[order[: int(settled.argmax()) if settled.any() else None]] = True
    return larger


def means_with_few_drawn(
    sums: Floats, sizes: Floats, few: NDArray[np.bool_], resamples: int, seed: int
) -> Floats:
    """(resamples,) means Σ sums / Σ sizes of resamples that draw G of the G groups.

    How often a resample holds each of the `few` is drawn. What its other groups add is drawn as
    one normal number, corrected for its skewness; their sizes follow that number by regression.
    """
    count, draws = len(sums), np.random.default_rng(seed)
    chances = np.full(int(few.sum()) + 1, 1 / count)
    chances[-1] = 1 - chances[:-1].sum()
    times = draws.multinomial(count, chances, resamples)
    mean = sums.sum() / sizes.sum()
    deviations = sums - mean * sizes
    rest, rest_sizes = deviations[~few], sizes[~few]
    spread, skewness = _spread(rest)
    root = np.sqrt(times[:, -1])
    away = root * root * _away(draws.standard_normal(resamples), spread, skewness, root)
    slope = np.mean((rest - rest.mean()) * rest_sizes) / spread**2 if spread > 0 else 0.0
    moved = times[:, :-1] @ deviations[few] + times[:, -1] * rest.mean() + away
    size = times[:, :-1] @ sizes[few] + times[:, -1] * rest_sizes.mean() + slope * away
    return np.asarray(mean + moved / size)


def flipped_sums_with_few_drawn(
    terms: Floats, few: NDArray[np.bool_], choices: int, seed: int
) -> Floats:
    """(choices,) sums of the terms under random signs: those of the `few` are drawn, the sum of
    the others is normal."""
    draws = np.random.default_rng(seed)
    signs = 2.0 * draws.integers(0, 2, (choices, int(few.sum()))) - 1
    spread = math.sqrt(float(np.square(terms[~few]).sum()))
    return np.asarray(signs @ terms[few] + spread * draws.standard_normal(choices))


def resampled_quantiles(sums: Floats, sizes: Floats, shares: Sequence[float]) -> list[float]:
    """The values below which these shares of the means of resamples would lie if all were drawn.

    A resample's mean is at most R + t where Σ (sums - (R + t) sizes) over the groups drawn is at
    most 0. The distribution of that sum is taken as normal, corrected for its skewness (Edgeworth),
    and the equation solved for t. With thousands of groups of which none is far larger than the
    others (`far_larger`) that is nearer to the bootstrap's limit than 2000 draws are, which miss an
    end of the interval by about 3 % of its half width. No end leaves the range of the groups.

    sums, sizes (G,)
    """
    root, size = math.sqrt(len(sums)), float(sizes.mean())
    mean = sums.sum() / sizes.sum()
    spread, skewness = _spread(sums - mean * sizes)
    least, most = (sums / sizes).min(), (sums / sizes).max()
    quantiles = []
    for z in map(NormalDist().inv_cdf, shares):
        at = mean + _away(z, spread, skewness, root) / size
        for _ in range(0 if np.ptp(sizes) == 0 else 2):  # t changes the spread of unequal groups
            at = mean + _away(z, *_spread(sums - at * sizes), root) / size
        quantiles.append(float(np.clip(at, least, most)))
    return quantiles


def _spread(values: Floats) -> tuple[float, float]:
    """Standard deviation and skewness."""
    left = values - values.mean()
    squares = left * left
    spread, third = math.sqrt(squares.mean()), float((squares * left).mean())
    return spread, third / spread**3 if spread > 0 else 0.0


def _away(z: float | Floats, spread: float, skewness: float, root: float | Floats) -> Floats:
    """How far from its expectation the mean of root² values lies at the normal quantile z."""
    return np.asarray((z + skewness * (z * z - 1) / (6 * root)) * spread / root)
