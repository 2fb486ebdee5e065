"""The figures of a line, and the table of all lines as numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import pandas as pd

from attacks import traits_of
from mjp_privacy.metrics.statistics import (
    PSNR_CAP,
    Counts,
    Share,
    Summary,
    independent_trials,
    summarise,
)
from mjp_privacy.report.lines import ATTACK_FACTS, Line, Scalar, exact_images, fact, not_run
from mjp_privacy.report.published import METRICS, PublishedRow, published_row
from mjp_privacy.report.rows import Key
from mjp_privacy.report.worst_case import DerivedLine
from mjp_privacy.training.published import is_papers_model

T = TypeVar("T")


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


# the table of all lines ---------------------------------------------------------------------------

VARIANTS = ("paper", "standard")

IDENTITY = ("model", "architecture", "setting", "gamma", "trained_gamma", "attack", "dtype")

NOT_COLUMNS = frozenset(
    (
        *(
            *IDENTITY,
            "run_id",
            "cell_key",
            "seed",
            "status",
            "reason",
            "notes",
            "paper_row",
            "checkpoint",
        ),
        *("checkpoint_sha", "victim", "data", "data_is_papers", "labels", "true_labels"),
        *("mean", "std", "resize", "interpolation", "planned_images", "role"),
    )
)
"""Cell entries that have a column of their own already, or a place in the notes."""


@dataclass(frozen=True)
class Table:
    """One variant of the metrics for every line."""

    variant: str
    frame: pd.DataFrame  # one row per line
    varying: tuple[str, ...]  # the further cell entries in which the lines differ
    measures: tuple[Measure, ...] = ()  # the diagnostics that at least one line has


def build_tables(lines: Sequence[Line], derived: Sequence[DerivedLine] = ()) -> tuple[Table, ...]:
    """The tables of all VARIANTS.

    A derived line is computed right after the last of its members, whose scores are then at hand.
    """
    varying, measures = varying_columns(lines), present(lines)
    last = {line.number: max(member.number for member in line.members) for line in derived}
    records: dict[int, list[dict[str, Any]]] = {}
    for line in sorted((*lines, *derived), key=lambda x: (last.get(x.number, x.number), x.number)):
        records[line.number] = [_record(line, name, varying, measures) for name in VARIANTS]
    ordered = [records[line.number] for line in (*lines, *derived)]
    return tuple(
        Table(name, pd.DataFrame.from_records([r[at] for r in ordered]), varying, measures)
        for at, name in enumerate(VARIANTS)
    )


def _record(
    line: Line, variant: str, varying: Sequence[str], measures: Sequence[Measure]
) -> dict[str, Any]:
    return {
        **_identity(line, varying),
        **_counts(line, variant),
        **_accuracy(line, variant),
        **_scores(line, variant),
        **_diagnostics(line),
        **_ladder(line, variant, measures),
    }


def varying_columns(lines: Sequence[Line]) -> tuple[str, ...]:
    """Scalar cell entries (seed first) in which lines differ and that have no column otherwise.

    Failed cells are ignored, since they may have failed before their entries were known. Controls
    are ignored for the entries of attacks: they have no options and see no upload.
    """
    described = [line for line in lines if line.cell.outcome.status != "failed"]
    cells = [line.cell.columns for line in described]
    attacks = [line.cell.columns for line in described if line.role == "attack"]
    keys = dict.fromkeys(key for cell in cells for key in cell if key not in NOT_COLUMNS)
    if all(line.cell.attack.known_as == line.attack for line in described):
        keys.pop("attack_name", None)  # it would repeat the labels
    return tuple(
        key
        for key in ["seed", *keys]
        if len({fact(cell, key) for cell in (attacks if key in ATTACK_FACTS else cells)}) > 1
    )


def paper_row(line: Line) -> PublishedRow | None:
    """The row of the paper's table that this line may stand beside; None where there is none.

    Only attacks have one, and only where model family, input size and images are the paper's.
    """
    wanted = line.cell.attack.paper_row if line.role == "attack" else None
    if wanted is None:
        return None
    row = published_row(wanted["model"], wanted["setting"])
    model = line.cell.model
    same_images = line.cell.command.data_is_papers
    return row if same_images and is_papers_model(model.architecture, model.size) else None


def rank_bound(line: Line) -> bool:
    """Whether the rank ceiling bounds the line: it inverts the embedding by minimum norm."""
    return line.role == "ceiling" or "rank" in traits_of(line.cell.attack.known_as)


def _identity(line: Line, varying: Sequence[str]) -> dict[str, Any]:
    return {
        "line": line.number,
        "run": line.run,
        "run_id": line.run_id,
        **{key: line.cell.columns.get(key) for key in IDENTITY},
        "seed": line.cell.seed,
        **{key: _fact(line, key) for key in varying if key != "seed"},
        "status": line.status,
        "reason": line.reason,
    }


def _fact(line: Line, key: str) -> Scalar:
    """One of the varying facts; of the attack's facts, derived lines have only the number of
    uploads and controls have none."""
    derived = isinstance(line, DerivedLine)
    foreign = key in ATTACK_FACTS and line.role != "attack" and not (derived and key == "uploads")
    return None if foreign else fact(line.cell.columns, key)


def _counts(line: Line, variant: str) -> dict[str, Any]:
    counts = image_counts(line, variant)
    return {
        "n": counts.ok,
        "n_failed": counts.failed,
        "n_unsupported": counts.unsupported,
        "n_unscored": counts.unscored,
        "n_not_run": not_run(line),
    }


def _columns(name: str, score: Summary, paper: float, *, scale: float = 1) -> dict[str, Any]:
    """The columns of one score: ours, the paper's, and the plain difference of the two."""
    return {
        f"{name}_mean": scale * score.mean,
        f"{name}_lo": scale * score.low,
        f"{name}_hi": scale * score.high,
        f"{name}_n": score.n,
        f"{name}_paper": paper,
        f"{name}_difference": scale * score.mean - paper,
    }


def _accuracy(line: Line, variant: str) -> dict[str, Any]:
    """Accuracy in percent, of the model as trained and of the one that the attack met."""
    paper = paper_row(line) if variant == "paper" else None
    intact, altered = (summary(line, "top1", which).as_share() for which in ("intact", "altered"))
    values = _columns("acc", intact, paper.acc if paper else math.nan, scale=100)
    unpublished = _columns("acc_altered", altered, math.nan, scale=100)
    kept = ("acc_altered_mean", "acc_altered_lo", "acc_altered_hi", "acc_altered_n")
    return {**values, **{key: unpublished[key] for key in kept}}


def _scores(line: Line, variant: str) -> dict[str, Any]:
    """The five scores; only the paper variant is compared with the paper's figures."""
    paper = paper_row(line) if variant == "paper" else None
    values: dict[str, Any] = {}
    for metric in METRICS:
        score = summary(line, metric, variant, cap=PSNR_CAP if metric == "psnr" else math.inf)
        values |= _columns(metric, score, getattr(paper, metric) if paper else math.nan)
        if metric == "psnr":
            values |= {
                "psnr_median": score.median,
                "psnr_exact": summary(line, "psnr", "paper", interval=False).exact,
                "psnr_at_20": success_share(line, 20, variant).count,
            }
    values["paper_row"] = paper.label if paper else None
    values["paper_row_repeats"] = paper.repeats if paper else None
    return values


def _diagnostics(line: Line) -> dict[str, Any]:
    ceiling = summary(line, "ceiling_psnr", "diagnostic", cap=PSNR_CAP, interval=False)
    bounded = rank_bound(line)
    medians = {
        f"{name}_median": summary(line, name, "diagnostic", interval=False).median
        for name in ("cond_a", "rank_a", "nonzero_rows", "zero_rows", "shuffled_patches")
    }
    empty = line.scored("empty_mask", "diagnostic")
    return {
        "grey_mean": summary(line, "grey_psnr", "diagnostic", interval=False).mean,
        "below_grey": below_grey(line),
        "below_grey_n": len(shared_scores(line, line, ("grey_psnr", "diagnostic"))),
        "in_place_mean": summary(line, "oracle_in_place_psnr", "diagnostic", interval=False).mean,
        "ceiling_mean": ceiling.mean if bounded else math.nan,
        "ceiling_n": ceiling.n if bounded else 0,
        "ceiling_distance": ceiling_distance(line) if bounded else math.nan,
        **medians,
        "empty_masks": int((empty > 0).sum()) if len(empty) else None,
    }


def _ladder(line: Line, variant: str, measures: Sequence[Measure]) -> dict[str, Any]:
    """The line's role, the attacks it chose, its shares of recovered images and its measures."""
    counts = json.dumps(line.counts) if isinstance(line, DerivedLine) else None
    return {
        "role": line.role,
        "chosen": counts,
        **{f"psnr_from_{limit}": success(line, limit, variant) for limit in THRESHOLDS},
        **{measure.column: measured(line, measure)[0] for measure in measures},
        **{f"{measure.diagnostic}_n": measured(line, measure)[1] for measure in measures},
    }
