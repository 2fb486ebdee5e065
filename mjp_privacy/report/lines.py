"""A line of the tables: a cell of a run and the scores stored for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import pandas as pd
from torch import Tensor

from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.coded import Coded, Images
from mjp_privacy.metrics.statistics import (
    PSNR_CAP,
    Counts,
    Share,
    Summary,
    independent_trials,
    summarise,
)
from mjp_privacy.report.published import METRICS
from mjp_privacy.report.rows import UNREADABLE, Column, Key, Scores, long_rows

MARKS = {
    "floor": " (control)",
    "ceiling": " (control)",
    "worst_case": " (oracle selection)",
}
"""Suffix of the attack's name on lines that are not attacks, by role."""

T = TypeVar("T")


KEPT = 96
"""Metrics of lines that are kept after they were read: a report asks for the same ones often, and
this many of 50,000 images are 40 MB."""


@dataclass(frozen=True)
class Line:
    """One line of the table: a cell of a run and the scores stored for it.

    Images that could not be read have no part in the scores nor in the number of planned images:
    they say nothing of what leaks, and a share that counted them would flatter the client.
    """

    number: int  # from 1, over all runs; the notes refer to it
    run: str  # name of the run folder, made unique
    cell: CellFacts
    table: Scores
    store: RunStore
    left_out: Sequence[Path] = field(default=(), kw_only=True)
    """Damaged files, whose images have no part in the line."""

    @property
    def run_id(self) -> str:
        """The cell's id inside its run, which is also the name of the folder of its rows."""
        return self.cell.run_id

    @property
    def label(self) -> str:
        """Model, setting and attack in words, such as `DeiT-S (a) april`."""
        return f"{self.cell.model.label} ({self.cell.setting}) {self.title}"

    @property
    def role(self) -> str:
        """`attack`; `floor` or `ceiling` for a control; the rule's name for a derived line."""
        return self.cell.attack.role

    @property
    def attack(self) -> str:
        """What tables call the attack."""
        return self.cell.attack.title

    @property
    def title(self) -> str:
        """The attack's label, with a mark on lines that are not attacks."""
        return f"{self.attack}{MARKS.get(self.role, '')}"

    @property
    def uploads(self) -> int:
        """How many uploads the attack uses."""
        return self.cell.attack.uploads or 1

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why images could not be read, by their id."""
        return self.table.unreadable

    @property
    def stored(self) -> bool:
        """Whether any rows are stored."""
        return len(self.images) + len(self.unreadable) > 0

    @property
    def images(self) -> Images:
        """The images with rows."""
        return self.table.images

    @property
    def status(self) -> str:
        """The cell's status; `failed` where a cell marked ok has no rows: its run was cut off."""
        if self.cell.outcome.status == "ok" and not len(self.images):
            return "failed"
        return self.cell.outcome.status

    @property
    def reason(self) -> str:
        """Why the line has no scores, even if it has diagnostics; empty if it has some."""
        if self.cell.outcome.reason:
            return self.cell.outcome.reason
        if not len(self.images) and self.left_out:
            return "its rows or pictures are damaged: run the attack again"
        if not len(self.images) and self.unreadable:
            return "none of its images could be read"
        if not len(self.images):
            return "no rows stored: the run ended before this cell; run the same command again"
        return self._commonest_reason

    @cached_property
    def _commonest_reason(self) -> str:
        """Empty where an image has a score."""
        keys = sorted(self.table.keys, key=lambda key: (key != ("psnr", "standard"), key))
        scored = (self.column(m, v).statuses for m, v in keys if v != "diagnostic")
        if any(statuses.equal("ok").any() for statuses in scored):
            return ""
        reasons: Counter[str] = Counter()
        for key in keys:
            reasons.update(self.column(*key).reasons.counts())
        reasons.pop("", None)
        return min(reasons, key=lambda reason: (-reasons[reason], reason), default="")

    @cached_property
    def reductions(self) -> dict[object, Any]:
        """What was computed from the scores before, by what was asked: figures and words."""
        return {}

    def column(self, metric: str, variant: str) -> Column:
        """The scores of one metric in the order of the images; empty where it was not computed."""
        return _column(self.table, metric, variant)

    def scored(self, metric: str, variant: str) -> pd.Series[float]:
        """The metric's value by image_id, for the images that have one."""
        return _scored(self.table, metric, variant)

    def reduced(self, name: Hashable, reduce: Callable[[], T]) -> T:
        """What `reduce` returns, computed once under this name: a figure, not the scores."""
        if name not in self.reductions:
            self.reductions[name] = reduce()
        known: T = self.reductions[name]
        return known

    def count(self, metric: str, variant: str) -> int:
        """How many images have a value of the metric."""
        return self.reduced(
            ("count", metric, variant), lambda: int(self.column(metric, variant).scored.sum())
        )

    def some_above_zero(self, diagnostic: str) -> bool:
        """Whether a diagnostic is above 0 on any image."""
        return self.reduced(
            ("above", diagnostic), lambda: bool((self.scored(diagnostic, "diagnostic") > 0).any())
        )

    def reconstruction(self, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of one image by kind; None where none were stored."""
        return self.store.pictures(self.run_id, image_id)

    @cached_property
    def photographs(self) -> Coded | None:
        """The photograph of each of the images, where several were cut from one; else None."""
        known = self.table.photographs
        return None if known is None or len(known.present().words) == len(known) else known

    @cached_property
    def groups(self) -> dict[str, str] | None:
        """Photograph by image_id, where several images were cut from the same one; else None."""
        known = self.photographs
        return None if known is None else dict(zip(self.images.ids, known.tolist(), strict=True))

    @property
    def rows(self) -> pd.DataFrame:
        """A row for each image, metric and variant, with the facts of the cell; not for many."""
        rows = self.stored_rows
        return rows[rows["status"] != UNREADABLE].reset_index(drop=True)

    @property
    def stored_rows(self) -> pd.DataFrame:
        """The same with those of images that could not be read."""
        return long_rows(self.store, self.run_id, self.cell.columns)


NOTHING = Coded(np.empty(0, np.int32), ())
EMPTY = Column(np.empty(0, dtype=np.int32), np.empty(0), NOTHING, NOTHING)
"""Scores that were not computed."""


@lru_cache(KEPT)
def _column(table: Scores, metric: str, variant: str) -> Column:
    return table.column(metric, variant) or EMPTY


@lru_cache(KEPT)
def _scored(table: Scores, metric: str, variant: str) -> pd.Series[float]:
    column = _column(table, metric, variant)
    column = column.chosen(column.scored)
    every = len(column.at) == len(table.images)  # then all lines share one index
    index = table.images.index if every else table.images.index[column.at]
    return pd.Series(column.values, index=index)


# figures ------------------------------------------------------------------------------------------

THRESHOLDS = (20, 30)
"""PSNR in dB from which an image counts as recovered: at 20 its content is usually recognisable, at
30 also its details."""


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


def _once(
    figure: Callable[Concatenate[Line, P], T],
) -> Callable[Concatenate[Line, P], T]:
    """A figure of a line that is computed once for the same arguments."""

    @wraps(figure)
    def known(line: Line, *args: P.args, **kwargs: P.kwargs) -> T:
        name = figure.__name__, args, tuple(kwargs.items())
        return line.reduced(name, lambda: figure(line, *args, **kwargs))

    return known


@_once
def summary(
    line: Line, metric: str, variant: str, *, cap: float = math.inf, interval: bool = True
) -> Summary:
    """Summary of one metric of one line; crops of the same photograph are resampled together."""
    column, photographs = line.column(metric, variant), line.photographs
    groups = None if photographs is None else photographs[column.at]
    return summarise(column.values, column.statuses, groups=groups, cap=cap, interval=interval)


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


def late_images(line: Line) -> frozenset[str]:
    """The images on which the attack's time ran out, whatever it had by then."""
    late = line.scored("over_budget", "diagnostic")
    return frozenset(map(str, late.index[late == 1]))


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
    return 100 * float(np.mean(both["second"] < both["first"])) if len(both) else math.nan


@_once
def ceiling_distance(line: Line) -> float:
    """Mean of ceiling - PSNR (standard), both capped, over the images that have both."""
    both = shared_scores(line, line, ("ceiling_psnr", "diagnostic"))
    ceiling, reached = both.clip(upper=PSNR_CAP).to_numpy().T
    return float(np.mean(ceiling - reached)) if len(both) else math.nan


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


PSNR: Key = ("psnr", "standard")


def shared_scores(
    first: Line, second: Line, first_key: Key = PSNR, second_key: Key = PSNR
) -> pd.DataFrame:
    """The values `first` and `second` of the images that both lines scored, by their ids.

    shared_scores(april, ours)["first"].mean()     # April's PSNR where ours was scored too
    """
    sides = {"first": first.scored(*first_key), "second": second.scored(*second_key)}
    return pd.concat(sides, axis=1, join="inner")
