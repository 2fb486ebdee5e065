"""A share is a count of a number: it is printed with both, and only all of them are 100 %."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mjp_privacy.metrics.coded import Coded

DASH = "–"


@dataclass(frozen=True)
class Share:
    """`count` of `of` images, with its Wilson interval.

    Share(116, 200).text()  # "116 of 200 (58 %, 51–65)"

    trials: what `independent_trials` gives where several images are of one photograph
    """

    count: int
    of: int
    trials: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.count <= self.of:
            raise ValueError(f"a share counts 0 to {self.of} of {self.of}, not {self.count}")

    @property
    def percent(self) -> float:
        """The share in percent, not rounded; NaN of nothing."""
        return 100 * self.count / self.of if self.of else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval in percent: low is 0 for none, high is 100 for all."""
        trials = self.of if self.trials is None else self.trials
        low, high = wilson(self.count / self.of if self.of else math.nan, trials)
        return 100 * low, 100 * high

    def percent_text(self) -> str:
        """The share in percent: `99.5 %` for 199 of 200, and `100 %` for nothing but all."""
        return f"{_digits(self.percent)} %" if self.of else DASH

    def text(self) -> str:
        """Count, share and interval, such as `116 of 200 (58 %, 51–65)`."""
        if not self.of:
            return "0 of 0"
        low, high = self.interval
        return f"{self.count} of {self.of} ({self.percent_text()}, {_digits(low)}–{_digits(high)})"


def independent_trials(groups: Sequence[str] | Coded) -> float:
    """As how many independent images these count, given the photograph that each was cut from.

    It is Kish's effective number (Σ size)² / Σ size², which takes crops of one photograph as if all
    were recovered or none: an interval made with it is never too narrow for their dependence, and
    rather too wide. All different: their number.

        independent_trials(["cat", "cat", "dog", "dog"])  # 2.0
    """
    sizes = np.array(list(Coded.of(groups).counts().values()), dtype=np.float64)
    return float(sizes.sum() ** 2 / (sizes**2).sum()) if len(sizes) else 0.0


def wilson(share: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share of n trials; the default z gives 95 %."""
    if not n:
        return math.nan, math.nan
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))


def _digits(percent: float) -> str:
    """As few decimals as do not turn a share between none and all into one of them."""
    decimals = 0
    while 0 < percent < 100 and float(f"{percent:.{decimals}f}") in (0.0, 100.0):
        decimals += 1
    return f"{percent:.{decimals}f}"
