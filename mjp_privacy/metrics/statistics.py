"""From scores of images to one figure with its uncertainty. Whatever is left out is counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.core.errors import UserError

RESAMPLES = 2000
LEVEL = 0.95
SEED = 0
"""Each interval starts a new generator with this seed, so that equal rows give equal tables."""

PSNR_CAP = 100.0
"""In dB. An image recovered exactly has PSNR inf; averages take min(PSNR, 100)."""

_CHUNK = 1 << 21  # resampled indices held at a time (8 MiB as int32)

Floats = NDArray[np.float64]


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
    """Mean, interval and median over the images that were scored; NaN where there is none."""

    mean: float
    low: float
    high: float
    median: float
    exact: int  # values that are +inf
    counts: Counts

    @property
    def n(self) -> int:
        """The number of images that were scored."""
        return self.counts.ok


def summarise(
    values: Sequence[float] | Floats,
    statuses: Sequence[str],
    *,
    groups: Sequence[str] | None = None,
    cap: float = math.inf,
    interval: bool = True,
) -> Summary:
    """Summary of one metric over one line's images.

    `statuses` says which values count: those with `ok`, but an `ok` value that is NaN is counted
    as failed. The mean and its interval are of min(value, cap), the median is of the values
    themselves. `groups` names the photograph each image was cut from, so that whole photographs
    are resampled.

        summarise([20.0, 30.0, nan], ["ok", "ok", "failed"]).mean  # 25.0
    """
    array = np.asarray(values, dtype=np.float64)
    if not len(array) == len(statuses) == len(array if groups is None else groups):
        raise ValueError("values, statuses and groups must have one entry per image")
    scored, counts = _scored(array, statuses)
    kept = array[scored]
    if not len(kept):
        return Summary(math.nan, math.nan, math.nan, math.nan, 0, counts)
    capped = np.minimum(kept, cap)
    kept_groups = None if groups is None else np.asarray(groups, dtype=object)[scored]
    low, high = bootstrap_interval(capped, kept_groups) if interval else (math.nan, math.nan)
    exact = int(np.isposinf(kept).sum())
    return Summary(float(capped.mean()), low, high, float(np.median(kept)), exact, counts)


def _scored(values: Floats, statuses: Sequence[str]) -> tuple[NDArray[np.bool_], Counts]:
    tally = Counter(statuses)
    unknown = sorted(set(tally) - {"ok", "failed", "unsupported", "unscored"})
    if unknown:
        raise UserError(
            f"Expected row statuses ok, failed, unsupported or unscored, got {unknown[0]!r}. "
            "The rows were written by another version: run the attack again."
        )
    ok = np.array([status == "ok" for status in statuses], dtype=bool)
    scored = ok & ~np.isnan(values)
    return scored, Counts(
        ok=int(scored.sum()),
        failed=tally["failed"] + int((ok & np.isnan(values)).sum()),
        unsupported=tally["unsupported"],
        unscored=tally["unscored"],
    )


def bootstrap_interval(
    values: Floats,
    groups: Sequence[str] | NDArray[np.object_] | None = None,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = SEED,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; (nan, nan) for fewer than two groups.

    A resample draws G of the G groups with replacement; its mean is Σ sums / Σ sizes. Without
    `groups` every value is its own group, which is the ordinary bootstrap.
    """
    sums, sizes = _group_sums(values, groups)
    if len(sums) < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    means = _resampled_means(sums, sizes, resamples, np.random.default_rng(seed))
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def median_interval(
    values: Floats,
    groups: Sequence[str] | NDArray[np.object_] | None = None,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = SEED,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median, with whole groups drawn as in
    `bootstrap_interval`; (nan, nan) for fewer than two groups."""
    names = np.arange(len(values)) if groups is None else np.asarray(groups, dtype=str)
    parts = [values[names == name] for name in np.unique(names)]
    if len(parts) < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(0, len(parts), size=(resamples, len(parts)))
    if all(len(part) == 1 for part in parts):
        medians = np.median(np.concatenate(parts)[drawn], axis=1)
    else:
        medians = np.array([np.median(np.concatenate([parts[i] for i in row])) for row in drawn])
    tail = (1 - level) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return float(low), float(high)


def _group_sums(
    values: Floats, groups: Sequence[str] | NDArray[np.object_] | None
) -> tuple[Floats, Floats]:
    if groups is None:
        return values, np.ones(len(values))
    names, of_value = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    sums, sizes = np.zeros(len(names)), np.zeros(len(names))
    np.add.at(sums, of_value, values)
    np.add.at(sizes, of_value, 1.0)
    return sums, sizes


def _resampled_means(
    sums: Floats, sizes: Floats, resamples: int, generator: np.random.Generator
) -> Floats:
    """Means of `resamples` resamples, drawn in chunks so that memory stays bounded."""
    count = len(sums)
    rows = max(1, _CHUNK // count)
    equal = bool((sizes == sizes[0]).all())
    means = np.empty(resamples)
    for start in range(0, resamples, rows):
        stop = min(start + rows, resamples)
        drawn = generator.integers(0, count, size=(stop - start, count), dtype=np.int32)
        weight = sizes[0] * count if equal else sizes[drawn].sum(axis=1)
        means[start:stop] = sums[drawn].sum(axis=1) / weight
    return means
