"""The table as numbers: one line a cell, in the order of the cells. Words come later (views.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mjp_privacy.report.loading import Line
from mjp_privacy.report.published import METRICS, PublishedRow, published_row
from mjp_privacy.report.statistics import PSNR_CAP, Counts, Summary, summarise

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
        *("mean", "std", "resize", "interpolation", "planned_images"),
    )
)
"""Cell entries with a column of their own or a place in the notes."""


@dataclass(frozen=True)
class Table:
    """`frame`: one row a line. `varying`: the further cell entries in which the lines differ."""

    variant: str
    frame: pd.DataFrame
    varying: tuple[str, ...]


def build_table(lines: Sequence[Line], variant: str) -> Table:
    """The table of one variant of the metrics; accuracies in percent, PSNR in dB."""
    varying = varying_columns(lines)
    records = [
        {
            **_identity(line, varying),
            **_counts(line, variant),
            **_accuracy(line, variant),
            **_scores(line, variant),
            **_diagnostics(line),
        }
        for line in lines
    ]
    return Table(variant, pd.DataFrame.from_records(records), varying)


def varying_columns(lines: Sequence[Line]) -> tuple[str, ...]:
    """Scalar cell entries (seed first) that differ between lines and would be lost otherwise.

    A cell that failed before its model was loaded does not know its entries: it has no say.
    """
    cells = [line.cell for line in lines if line.cell["status"] != "failed"]
    keys = dict.fromkeys(key for cell in cells for key in cell if key not in NOT_COLUMNS)
    return tuple(
        key for key in ["seed", *keys] if len({_scalar(cell.get(key)) for cell in cells}) > 1
    )


def _scalar(value: Any) -> str | float | int | bool | None:
    if value is None or isinstance(value, (str, float, int, bool)):
        return value
    return None  # lists and mappings are for the notes


def paper_row(line: Line) -> PublishedRow | None:
    """The printed row this line stands beside."""
    wanted = line.cell.get("paper_row")
    return None if wanted is None else published_row(wanted["model"], wanted["setting"])


def summary(
    line: Line, metric: str, variant: str, *, cap: float = math.inf, interval: bool = True
) -> Summary:
    """Summary of one metric of one line, by photograph where the images are crops."""
    rows = line.scores(metric, variant)
    groups = line.groups
    return summarise(
        rows["value"].to_numpy(dtype=float),
        rows["status"].astype(str).tolist(),
        groups=None if groups is None else [groups[str(image)] for image in rows["image_id"]],
        cap=cap,
        interval=interval,
    )


def _identity(line: Line, varying: Sequence[str]) -> dict[str, Any]:
    return {
        "line": line.number,
        "run": line.run,
        "run_id": line.run_id,
        **{key: line.cell.get(key) for key in IDENTITY},
        "seed": line.cell["seed"],
        **{key: _scalar(line.cell.get(key)) for key in varying if key != "seed"},
        "status": line.status,
        "reason": line.reason,
    }


def image_counts(line: Line, variant: str) -> Counts:
    """What became of a line's images, by PSNR or, where it was not asked for, the next score."""
    metrics = ["psnr", *METRICS]
    computed = [metric for metric in metrics if len(line.scores(metric, variant))]
    return summary(line, [*computed, "psnr"][0], variant, interval=False).counts


def _counts(line: Line, variant: str) -> dict[str, Any]:
    counts = image_counts(line, variant)
    return {
        "n": counts.ok,
        "n_failed": counts.failed,
        "n_unsupported": counts.unsupported,
        "n_unscored": counts.unscored,
        "n_not_run": not_run(line),
    }


def not_run(line: Line) -> int:
    """Images that the run's last command planned and that have no rows yet."""
    planned = int(line.cell.get("planned_images") or 0)
    return max(0, planned - line.rows["image_id"].nunique())


def _columns(name: str, score: Summary, paper: float, *, scale: float = 1) -> dict[str, Any]:
    """The columns of one score: ours, the paper's, and the unadjusted difference."""
    return {
        f"{name}_mean": scale * score.mean,
        f"{name}_lo": scale * score.low,
        f"{name}_hi": scale * score.high,
        f"{name}_n": score.n,
        f"{name}_paper": paper,
        f"{name}_difference": scale * score.mean - paper,
    }


def _accuracy(line: Line, variant: str) -> dict[str, Any]:
    """Accuracy in percent; a difference from the paper's only on the paper's images."""
    paper = paper_row(line) if variant == "paper" else None
    intact, altered = (summary(line, "top1", which) for which in ("intact", "altered"))
    values = _columns("acc", intact, paper.acc if paper else math.nan, scale=100)
    if not line.cell.get("data_is_papers"):
        values["acc_difference"] = math.nan
    unpublished = _columns("acc_altered", altered, math.nan, scale=100)
    kept = ("acc_altered_mean", "acc_altered_lo", "acc_altered_hi", "acc_altered_n")
    return {**values, **{key: unpublished[key] for key in kept}}


def _scores(line: Line, variant: str) -> dict[str, Any]:
    """The five scores; the paper's figures stand beside its own variant only."""
    paper = paper_row(line) if variant == "paper" else None
    values: dict[str, Any] = {}
    for metric in METRICS:
        score = summary(line, metric, variant, cap=PSNR_CAP if metric == "psnr" else math.inf)
        values |= _columns(metric, score, getattr(paper, metric) if paper else math.nan)
        if metric == "psnr":
            values |= {"psnr_median": score.median, "psnr_exact": score.exact}
    values["paper_row"] = paper.label if paper else None
    values["paper_row_repeats"] = paper.repeats if paper else None
    return values


def _diagnostics(line: Line) -> dict[str, Any]:
    ceiling = summary(line, "ceiling_psnr", "diagnostic", cap=PSNR_CAP, interval=False)
    medians = {
        f"{name}_median": summary(line, name, "diagnostic", interval=False).median
        for name in ("cond_a", "rank_a", "nonzero_rows", "zero_rows", "shuffled_patches")
    }
    empty = line.scored("empty_mask", "diagnostic")
    return {
        "grey_mean": summary(line, "grey_psnr", "diagnostic", interval=False).mean,
        "below_grey": below_grey(line),
        "in_place_mean": summary(line, "oracle_in_place_psnr", "diagnostic", interval=False).mean,
        "ceiling_mean": ceiling.mean,
        "ceiling_n": ceiling.n,
        "ceiling_distance": ceiling_distance(line),
        **medians,
        "empty_masks": int((empty > 0).sum()) if len(empty) else None,
    }


def below_grey(line: Line) -> float:
    """Share (percent) of images that a uniform grey scores better than, by standard PSNR."""
    grey = line.scored("grey_psnr", "diagnostic")
    reached = line.scored("psnr", "standard")
    both = grey.index.intersection(reached.index)
    if not len(both):
        return math.nan
    return 100 * float(np.mean(reached[both].to_numpy() < grey[both].to_numpy()))


def ceiling_distance(line: Line) -> float:
    """Mean of ceiling - PSNR (standard), both capped, over the images that have both."""
    ceiling = line.scored("ceiling_psnr", "diagnostic").clip(upper=PSNR_CAP)
    reached = line.scored("psnr", "standard").clip(upper=PSNR_CAP)
    both = ceiling.index.intersection(reached.index)
    if not len(both):
        return math.nan
    return float(np.mean(ceiling[both].to_numpy() - reached[both].to_numpy()))
