"""Figures of one line: summaries of its metrics, and what is counted over its images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from mjp_privacy.metrics.shares import Share, independent_trials
from mjp_privacy.metrics.statistics import PSNR_CAP, Counts, Summary, summarise
from mjp_privacy.report.line import Line
from mjp_privacy.report.published import METRICS
from mjp_privacy.report.shared_images import shared_scores

THRESHOLDS = (20, 30)
"""PSNR in dB from which an image counts as recovered: at 20 its content is plain to see, at 30
also its details."""


@dataclass(frozen=True)
class Measure:
    """A diagnostic of an attack or a region, and how its values per image become one figure."""

    diagnostic: str
    title: str
    statistic: Literal["mean", "median"] = "mean"
    decimals: int = 2
    cap: float = math.inf

    @property
    def column(self) -> str:
        """Its column in table.csv, such as `seconds_median`."""
        return f"{self.diagnostic}_{self.statistic}"


REGIONS = (
    Measure("mask_precision", "mask precision", decimals=3),
    Measure("mask_recall", "mask recall", decimals=3),
    Measure("visible_psnr", "PSNR, unmasked", cap=PSNR_CAP),
    Measure("mean_visible_psnr", "mean image, unmasked", cap=PSNR_CAP),
    Measure("masked_psnr", "PSNR, masked", cap=PSNR_CAP),
    Measure("oracle_permutation_psnr", "PSNR, oracle permutation", cap=PSNR_CAP),
    Measure("jigsaw_direct", "jigsaw direct", decimals=3),
    Measure("jigsaw_neighbour", "jigsaw neighbour", decimals=3),
    Measure("unshuffled_uploads", "uploads unshuffled", decimals=1),
    Measure("always_masked", "patches masked in every upload", decimals=1),
    Measure("open_directions", "open directions", decimals=1),
    Measure("lattice_found", "lattice found", decimals=2),
    Measure("gradient_residual", "gradient residual (median)", "median", 4),
    Measure("steps", "steps (median)", "median", 0),
    Measure("seconds", "s / image (median)", "median", 2),
)
"""Diagnostics that only some attacks and settings have; a report shows those that occur."""


P = ParamSpec("P")
T = TypeVar("T")


def _once(
    figure: Callable[Concatenate[Line, P], T],
) -> Callable[Concatenate[Line, P], T]:
    """A figure of a line that is computed once for the same arguments."""

    @wraps(figure)
    def known(line: Line, *args: P.args, **kwargs: P.kwargs) -> T:
        name = figure.__name__, args, tuple(kwargs.items())
        return line.reduced(name, lambda: figure(line, *args, **kwargs))

    return known


def summary(
    line: Line, metric: str, variant: str, *, cap: float = math.inf, interval: bool = True
) -> Summary:
    """Summary of one metric of one line; crops of the same photograph are resampled together."""
    key = "summary", metric, variant, cap, interval
    if key not in line.reductions:
        line.reductions[key] = _summary(line, metric, variant, cap, interval)
    known: Summary = line.reductions[key]
    return known


def _summary(line: Line, metric: str, variant: str, cap: float, interval: bool) -> Summary:
    column = line.column(metric, variant)
    photographs = line.photographs
    return summarise(
        column.values,
        column.statuses,
        groups=None if photographs is None else photographs[column.at],
        cap=cap,
        interval=interval,
    )


@_once
def image_counts(line: Line, variant: str) -> Counts:
    """How many images were scored, failed and so on, by PSNR or else the first other score."""
    metrics = ["psnr", *METRICS]
    computed = (metric for metric in metrics if len(line.column(metric, variant).at))
    return summary(line, next(computed, "psnr"), variant, interval=False).counts


def exact_images(line: Line) -> frozenset[str]:
    """The images that are equal to the compared picture in every 8-bit value."""
    scored = line.scored("psnr", "paper")
    return frozenset(map(str, scored.index[np.isposinf(scored.to_numpy())]))


def failed_images(line: Line) -> frozenset[str]:
    """The images that have a row of status failed."""
    columns = (line.column(*key) for key in line.table.keys)
    places = {at for c in columns for at in c.at[c.statuses.equal("failed")].tolist()}
    return frozenset(line.images.ids[at] for at in places)


def not_run(line: Line) -> int:
    """How many images the run's last command planned that have no rows yet."""
    planned = line.cell.outcome.planned_images
    return max(0, planned - len(line.images))


@_once
def capped_mean(line: Line) -> float:
    """Mean of min(PSNR, 100) in the standard variant; NaN where no image was scored."""
    values = line.scored("psnr", "standard").clip(upper=PSNR_CAP)
    return float(values.mean()) if len(values) else math.nan


@_once
def capped_median(line: Line, metric: str, variant: str, cap: float = PSNR_CAP) -> float:
    """Median of min(value, cap) over the images that were scored."""
    values = line.scored(metric, variant).clip(upper=cap)
    return float(values.median()) if len(values) else math.nan


def success(line: Line, threshold: float, variant: str) -> float:
    """Percent of images at or above `threshold` dB, as `success_share` counts them."""
    return success_share(line, threshold, variant).percent


@_once
def success_share(line: Line, threshold: float, variant: str = "standard") -> Share:
    """How many of the images an attacker was given are at or above `threshold` dB.

    Images that the attack failed on or does not support count as not recovered; images that could
    not be scored are left out.
    """
    return share_of_tried(line, int((line.scored("psnr", variant) >= threshold).sum()), variant)


def exact_share(line: Line) -> Share:
    """How many of the images an attacker was given came back equal in every 8-bit value."""
    return share_of_tried(line, len(exact_images(line)), "paper")


def share_of_tried(line: Line, count: int, variant: str = "standard") -> Share:
    """So many of the images that an attacker was given: all but those that were not scored."""
    column, photographs = line.column("psnr", variant), line.photographs
    tried = ~column.statuses.equal("unscored")
    trials = None
    if photographs is not None:
        trials = independent_trials(photographs[column.at][tried])
    return Share(count, int(tried.sum()), trials)


@_once
def below_grey(line: Line) -> float:
    """Percent of images for which a uniform grey has a higher standard PSNR than the attack."""
    both = shared_scores(line, line, ("grey_psnr", "diagnostic"))
    return 100 * float(np.mean(both.second < both.first)) if len(both.at) else math.nan


@_once
def ceiling_distance(line: Line) -> float:
    """Mean of ceiling - PSNR (standard), both capped, over the images that have both."""
    both = shared_scores(line, line, ("ceiling_psnr", "diagnostic"))
    ceiling, reached = (np.minimum(side, PSNR_CAP) for side in (both.first, both.second))
    return float(np.mean(ceiling - reached)) if len(both.at) else math.nan


def present(lines: Sequence[Line]) -> tuple[Measure, ...]:
    """The measures for which at least one line has a value."""
    return tuple(
        measure
        for measure in REGIONS
        if any(line.count(measure.diagnostic, "diagnostic") for line in lines)
    )


def measured(line: Line, measure: Measure) -> tuple[float, int]:
    """The figure and the number of images behind it; (NaN, 0) where there is none."""
    name = measure.diagnostic
    if measure.statistic == "median":
        values = line.scored(name, "diagnostic")
        return capped_median(line, name, "diagnostic", measure.cap), len(values)
    mean = summary(line, name, "diagnostic", cap=measure.cap, interval=False)
    return mean.mean, mean.n
