"""From scores of images to figures with their uncertainty. Whatever is left out is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from mjp_privacy.core.errors import UserError

if TYPE_CHECKING:  # it takes half a second to import
    import pandas as pd

# ------------------------------------------------------------------------------------------------
# A share is a count of a number: it is printed with both, and only all of them are 100 %.

DASH = "–"

Words: TypeAlias = "Sequence[str] | pd.Categorical"
"""A status or a photograph for each image; as a Categorical it is a number for each."""


def categorical(words: Words) -> pd.Categorical:
    """The words with a number for each, that of its place among the sorted ones."""
    import pandas as pd

    listed: Any = words
    return pd.Categorical(listed)


def are(words: pd.Categorical, word: str) -> NDArray[np.bool_]:
    """Which entries are this word."""
    return np.asarray(words == word)


def different(words: pd.Categorical) -> list[str]:
    """The words that occur, each once."""
    return [str(words.categories[code]) for code in np.unique(words.codes)]


@dataclass(frozen=True)
class Share:
    """`count` of `of` images, with its Wilson interval.

    Share(116, 200).text()  # "116 of 200 (58 %, 51–65)"

    trials: what `independent_trials` gives where several images are of one photograph
    """

    count: int
    of: int
    trials: float | None = None

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

    def text(self) -> str:
        """Count, share and interval, such as `116 of 200 (58 %, 51–65)`."""
        if not self.of:
            return "0 of 0"
        figures = (self.percent, *self.interval)
        share, low, high = (f"{x:.{decimals_apart(x, 0, 0.0, 100.0)}f}" for x in figures)
        return f"{self.count} of {self.of} ({share} %, {low}–{high})"


def independent_trials(groups: Words) -> float:
    """As how many independent images these count, given the photograph that each was cut from.

    It is Kish's effective number (Σ size)² / Σ size², which takes crops of one photograph as if all
    were recovered or none: an interval made with it is never too narrow for their dependence, and
    rather too wide. All different: their number.

        independent_trials(["cat", "cat", "dog", "dog"])  # 2.0
    """
    sizes = np.bincount(categorical(groups).codes).astype(np.float64)
    return float(sizes.sum() ** 2 / (sizes**2).sum()) if len(sizes) else 0.0


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share of n trials."""
    if not n:
        return math.nan, math.nan
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))


def decimals_apart(value: float, decimals: int, *limits: float) -> int:
    """At least so many decimals, and as many as keep a number apart from limits that it has not
    reached: 99.98 % is not printed as 100, so decimals_apart(99.98, 0, 100.0) is 2."""
    while value not in limits and float(f"{value:.{decimals}f}") in limits:
        decimals += 1
    return decimals


LEAST_DRAWN, FEWEST_OF_MEDIAN = 30, 6
"""Groups below which an interval of a mean is Student's, for a percentile bootstrap of 95 % covers
the mean of ten normal values in 89 % of cases, of two in 50 %; and below which a median has none:
the range of five values holds it in 94 % of cases."""
RESAMPLES = 2000
LEVEL = 0.95
ENDS = (1 - LEVEL) / 2, (1 + LEVEL) / 2
MOST_DRAWN = 2048
"""Groups up to which resamples are drawn in any case; of more only where a few decide alone."""
SEED = 0
"""Each interval starts a new generator with this seed, so that equal rows give equal tables."""

ENTRIES_AT_ONCE = 1 << 18
"""Of the matrix of draws, held as floating point at a time (2 MiB)."""

Floats = NDArray[np.float64]
Draws = NDArray[np.uint8]
"""(resamples, groups): how often each resample holds each group, far below 256 times."""

PSNR_CAP = 100.0
"""In dB. An image recovered exactly has PSNR inf; averages take min(PSNR, 100)."""
ANY = (-math.inf, math.inf)
RANGES = {
    **{"mse": (0.0, 1.0), "fft2d": (0.0, 2.0), "psnr": (0.0, PSNR_CAP), "ssim": (-1.0, 1.0)},
    "lpips": (0.0, math.inf),
}


def range_of(metric: str) -> tuple[float, float]:
    """Between which values averages of a metric lie: range_of("ceiling_psnr") is (0, 100)."""
    return RANGES.get(metric.rpartition("_")[2], ANY)


@dataclass(frozen=True)
class Counts:
    """How many images of one line were scored, and how many were not, by reason."""

    ok: int = 0
    failed: int = 0
    unsupported: int = 0
    unscored: int = 0

    @property
    def total(self) -> int:
        """The number of all images, scored or not."""
        return self.ok + self.failed + self.unsupported + self.unscored


@dataclass(frozen=True)
class Summary:
    """Mean and interval over the images that were scored; NaN where there is none."""

    mean: float
    low: float
    high: float
    exact: int  # values that are +inf
    counts: Counts
    trials: float = 0.0  # as how many independent images the scored ones count

    @property
    def n(self) -> int:
        """The number of images that were scored."""
        return self.counts.ok

    def as_share(self) -> Summary:
        """The same of values that are 0 or 1, with Wilson's interval: that of a mean is too narrow
        where nearly all images agree, and has no width where all do."""
        low, high = wilson(self.mean, self.trials)
        return replace(self, low=low, high=high)


def summarise(
    values: Sequence[float] | Floats,
    statuses: Words,
    *,
    groups: Words | None = None,
    within: tuple[float, float] = ANY,
) -> Summary:
    """Summary of one metric over one line's images.

    `statuses` says which values count: those with `ok`, but an `ok` value that is NaN is counted
    as failed. Values above `within` are taken as its end, and the interval lies in it.
    `groups` names the photograph each image was cut from: these are independent.

        summarise([20.0, 30.0, nan], ["ok", "ok", "failed"]).mean  # 25.0
    """
    array = np.asarray(values, dtype=np.float64)
    states = categorical(statuses)
    ok = are(states, "ok")
    scored = ok & ~np.isnan(array)
    counts = Counts(
        ok=int(scored.sum()),
        failed=int(are(states, "failed").sum() + ok.sum() - scored.sum()),
        unsupported=int(are(states, "unsupported").sum()),
        unscored=int(are(states, "unscored").sum()),
    )
    if counts.total != len(array):
        unknown = sorted({*different(states)} - vars(counts).keys())
        raise UserError(
            f"Expected row statuses ok, failed, unsupported or unscored, got {unknown[0]!r}. "
            "The rows were written by another version: run the attack again."
        )
    kept = array[scored]
    if not len(kept):
        return Summary(math.nan, math.nan, math.nan, 0, counts)
    capped = np.minimum(kept, within[1])
    kept_groups = None if groups is None else categorical(groups)[scored]
    low, high = mean_interval(capped, kept_groups)
    low, high = max(low, within[0]), min(high, within[1])
    exact = int(np.isposinf(kept).sum())
    trials = float(len(kept)) if kept_groups is None else independent_trials(kept_groups)
    return Summary(float(capped.mean()), low, high, exact, counts, trials)


def mean_interval(values: Floats, groups: Words | None = None) -> tuple[float, float]:
    """The 95 % interval of the mean; (nan, nan) for fewer than two groups.

    It is the percentile bootstrap's: a resample draws G of the G groups with replacement; its mean
    is Σ sums / Σ sizes. Without `groups` every value is its own group, which is the ordinary
    bootstrap. Of fewer than LEAST_DRAWN groups it is Student's t around the same mean. Of more than
    MOST_DRAWN groups, none of which decides alone, nothing is drawn either: the interval is the
    normal one, within the range of the groups.
    """
    sums, sizes = group_sums(values, groups)
    count = len(sums)
    if count < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    mean = sums.sum() / sizes.sum()
    away = sums - mean * sizes
    error = float(np.linalg.norm(away) / sizes.sum())
    if count < LEAST_DRAWN:
        half = float(stdtrit(count - 1, ENDS[1])) * error * math.sqrt(count / (count - 1))
        return float(mean - half), float(mean + half)
    squares = np.square(away)  # none decides where none is more than a hundredth of all
    if count > MOST_DRAWN and squares.max() <= squares.sum() / 100:
        half = NormalDist().inv_cdf(ENDS[1]) * error
        least, most = (sums / sizes).min(), (sums / sizes).max()
        return float(max(mean - half, least)), float(min(mean + half, most))
    drawn = (block.astype(np.float64) for block in draws(count, RESAMPLES, SEED))
    means = np.concatenate([times @ sums / (times @ sizes) for times in drawn])
    low, high = np.quantile(means, ENDS)
    return float(low), float(high)


def median_interval(values: Floats, groups: Words | None = None) -> tuple[float, float]:
    """Percentile bootstrap interval of the median, with whole groups drawn as in
    `mean_interval`; (nan, nan) for fewer than FEWEST_OF_MEDIAN groups."""
    of_value: NDArray[np.integer] = np.arange(len(values))
    if groups is not None:
        of_value = categorical(groups).remove_unused_categories().codes
    count = int(of_value.max(initial=-1)) + 1
    if count < FEWEST_OF_MEDIAN or not np.isfinite(values).all():
        return math.nan, math.nan
    order = np.argsort(values)
    ascending, of_value = values[order], of_value[order]
    if count > MOST_DRAWN:
        low, high = (_median_quantile(ascending, of_value, share) for share in ENDS)
        return low, high
    medians = []
    for block in draws(count, RESAMPLES, SEED):
        reached = np.cumsum(block[:, of_value], axis=1, dtype=np.int64)
        size = reached[:, -1:]
        below, above = ((reached > at).argmax(axis=1) for at in ((size - 1) // 2, size // 2))
        medians.append((ascending[below] + ascending[above]) / 2)
    low, high = np.quantile(np.concatenate(medians), ENDS)
    return float(low), float(high)


def _median_quantile(ascending: Floats, of_value: NDArray[np.integer], share: float) -> float:
    """The value below which this share of the medians of resampled groups lies.

    A resample's median is at most x where at least half of its values are. How many more of them
    are at most x than above it is a sum over the groups drawn, whose distribution is taken as
    normal: x is the first value at which it lies as far above 0 as the share asks.
    """
    z, count = NormalDist().inv_cdf(share), int(of_value.max()) + 1
    first, last = 0, len(ascending) - 1
    while first < last:
        middle = (first + last) // 2
        side = np.where(np.arange(len(ascending)) <= middle, 1.0, -1.0)
        surplus = np.bincount(of_value, side, count)
        if surplus.sum() >= z * math.sqrt(count) * surplus.std():
            last = middle
        else:
            first = middle + 1
    return float(ascending[first])


@lru_cache(maxsize=8)  # of 4 MB each, of up to MOST_DRAWN groups
def draws(count: int, resamples: int, seed: int) -> list[Draws]:
    """Blocks of the (resamples, count) matrix of how often each resample holds each group; drawn
    once, kept for further intervals of as many groups."""
    generator = np.random.default_rng(seed)
    rows = max(1, ENTRIES_AT_ONCE // count)
    blocks: list[Draws] = []
    for start in range(0, resamples, rows):
        shape = (min(rows, resamples - start), count)
        drawn = generator.integers(0, count, size=shape)
        drawn += count * np.arange(shape[0])[:, None]
        times = np.bincount(drawn.ravel(), minlength=shape[0] * count)
        blocks.append(times.reshape(shape).astype(np.uint8))
    return blocks


def group_sums(values: Floats, groups: Words | None) -> tuple[Floats, Floats]:
    """The sum and the number of each group's values; without groups each value is one."""
    if groups is None:
        return values, np.ones(len(values))
    codes = categorical(groups).codes
    sizes = np.bincount(codes).astype(np.float64)
    sums = np.bincount(codes, values).astype(np.float64)
    return sums[sizes > 0], sizes[sizes > 0]


# ------------------------------------------------------------------------------------------------
# Is one score higher than another on the same images? Wilcoxon's signed-rank test, an effect and an
# interval.
#
# Images of one photograph are averaged first, so that a photograph counts once however many crops
# of it there are; the mean difference alone is over images, for it is the difference of the two
# means that tables print.

EXACT_RANKS = 50  # pairs that differ, up to which Wilcoxon's distribution is computed exactly


@dataclass(frozen=True)
class PairedTest:
    """Comparison of two scores of the same images; differences are first - second."""

    images: int
    n: int  # pairs: photographs where images of one were averaged, else images
    median: float
    mean: float  # over images
    low: float  # of the mean's 95 % interval over photographs; NaN for fewer than two
    high: float
    effect: float  # matched-pairs rank-biserial correlation: 1 where every pair is higher
    p: float  # Wilcoxon, two-sided


def paired_test(
    first: Sequence[float] | Floats,
    second: Sequence[float] | Floats,
    *,
    groups: Sequence[str] | None = None,
    cap: float = PSNR_CAP,
) -> PairedTest:
    """Compare two scores of the same images, in the same order; without those that have none.

    Scores are 0 or more and are taken as min(score, cap), so that two exact images (PSNR inf)
    differ by zero. `groups` names the photograph of each image. Without images everything is NaN.

        paired_test([30.0, inf, 25.0], [20.0, inf, 24.0]).mean  # 3.67
    """
    a, b = (np.minimum(np.asarray(side, dtype=np.float64), cap) for side in (first, second))
    of_images: Floats = a - b
    sums, sizes = group_sums(of_images, groups)
    differences = sums / sizes
    n = len(differences)
    if not n:
        nan = math.nan
        return PairedTest(0, 0, nan, nan, nan, nan, nan, nan)
    # Ranks of the absolute differences with their signs; equal ones share the mean rank. Pairs
    # without a difference take part in the ranking and then count 0 (Pratt's rule).
    _, of_pair, counts = np.unique(np.abs(differences), return_inverse=True, return_counts=True)
    shared = np.cumsum(counts) - (counts - 1) / 2
    ranks = np.sign(differences) * shared[of_pair.reshape(n)]
    low, high = mean_interval(of_images, groups)
    low, high = max(low, -cap), min(high, cap)
    return PairedTest(
        images=len(of_images),
        n=n,
        median=float(np.median(differences)),
        mean=float(of_images.mean()),
        low=low,
        high=high,
        effect=float(ranks.sum() / (n * (n + 1) / 2)),
        p=wilcoxon_p(ranks),
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
