"""Wilson's interval by root finding, for shares of crops that count as fewer images."""

import math
from collections import Counter
from collections.abc import Sequence

from scipy.optimize import brentq
from scipy.stats import norm


def score_interval(share: float, trials: float) -> tuple[float, float]:
    """The true shares that a normal test of this share just does not reject."""

    def rejected(true: float) -> float:
        return abs(share - true) - norm.ppf(0.975) * math.sqrt(true * (1 - true) / trials)

    inside = min(max(share, 1e-9), 1 - 1e-9)  # at 0 and 1 itself nothing is rejected either
    low = brentq(rejected, 1e-12, inside) if share else 0.0
    high = brentq(rejected, inside, 1 - 1e-12) if share < 1 else 1.0
    return low, high


def as_many(photographs: Sequence[str]) -> float:
    """As how many independent images these count, with the photograph of each: Kish's number."""
    sizes = Counter(photographs).values()
    return float(sum(sizes) ** 2 / sum(size**2 for size in sizes))
