"""The figures of a line, the paper's Table 5 as printed, and the table of all lines as numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.core.registry import unknown_name
from mjp_privacy.metrics.pictures import arrow
from mjp_privacy.metrics.scores import METRICS as SCORES
from mjp_privacy.metrics.statistics import (
    PSNR_CAP,
    Share,
    Summary,
    are,
    independent_trials,
    summarise,
)
from mjp_privacy.report.lines import ATTACK_FACTS, DIAGNOSTIC, Key, Line, fact, once
from mjp_privacy.report.worst_case import DerivedLine

METRICS = ("mse", "fft2d", "psnr", "ssim", "lpips")
"""The five scores in the paper's order of columns."""

TITLES: Mapping[str, str] = {
    "acc": "Acc.",
    "mse": "MSE",
    "fft2d": "FFT2D",
    "psnr": "PSNR",
    "ssim": "SSIM",
    "lpips": "LPIPS",
}

ARROWS: Mapping[str, str] = {
    "acc": arrow(True),
    **{name: arrow(SCORES[f"{name}/paper"].higher_is_better) for name in METRICS},
}
"""Which direction is better for the model owner: a bad reconstruction is good privacy."""

THRESHOLDS = (20, 30)
"""PSNR in dB from which an image counts as recovered: at 20 its content is usually recognisable, at
30 also its details."""


MEANS = (
    *("mask_precision", "mask_recall", "visible_psnr", "mean_visible_psnr", "masked_psnr"),
    *("oracle_permutation_psnr", "jigsaw_direct", "jigsaw_neighbour", "unshuffled_uploads"),
    *("always_masked", "open_directions", "lattice_found"),
)
MEDIANS = ("gradient_residual", "steps", "seconds")
"""Diagnostics that only some attacks and settings have: table.csv has the means and medians of
those that occur."""


def cap_of(metric: str) -> float:
    """What a mean counts a value as at most."""
    return PSNR_CAP if metric.endswith("psnr") else math.inf


@once
def summary(line: Line, metric: str, variant: str) -> Summary:
    """Summary of one metric of one line; crops of the same photograph are resampled together."""
    values, statuses, groups = line.column(metric, variant)
    cap = cap_of(metric)
    return summarise(values.to_numpy(), statuses, groups=groups, cap=cap)


@once
def accuracies(line: Line) -> tuple[Summary, Summary]:
    """Shares of images that the model took for what they are: as trained, and as the attack met
    it."""
    intact, altered = (summary(line, "top1", which) for which in ("intact", "altered"))
    return intact.as_share(), altered.as_share()


def mean_of(line: Line, metric: str, variant: str = DIAGNOSTIC) -> float:
    """Mean of min(value, cap) over the images that have one; NaN where none has."""
    values = line.scored(metric, variant).to_numpy()
    return float(np.minimum(values, cap_of(metric)).mean()) if len(values) else math.nan


@once
def capped_median(line: Line, metric: str = "psnr", variant: str = "standard") -> float:
    """Median of min(value, cap) over the images that were scored; NaN where there is none."""
    values = line.scored(metric, variant).to_numpy()
    return float(np.median(np.minimum(values, cap_of(metric)))) if len(values) else math.nan


@once
def success_share(line: Line, threshold: float, variant: str = "standard") -> Share:
    """How many of the images an attacker was given are at or above `threshold` dB: those that the
    attack failed on or does not support count as not recovered."""
    return share_of_tried(line, int((line.scored("psnr", variant) >= threshold).sum()))


@once
def exact_share(line: Line) -> Share:
    """How many of the images an attacker was given came back equal in every 8-bit value."""
    return share_of_tried(line, len(line.exact_images))


def share_of_tried(line: Line, count: int) -> Share:
    """So many of the images that an attacker was given: all but those that were not scored."""
    _, statuses, photographs = line.column("psnr", "standard")
    tried = ~are(statuses, "unscored")
    trials = None if photographs is None else independent_trials(photographs[tried])
    return Share(count, int(tried.sum()), trials)


def _beside(line: Line, diagnostic: str) -> NDArray[np.float64]:
    """PSNR (standard) and a diagnostic of the images that have both: (2, n)."""
    columns = ["psnr.standard", f"{diagnostic}.{DIAGNOSTIC}"]
    known = line.frame.reindex(columns=columns).dropna()
    return known.to_numpy(np.float64).T


PSNR: Key = ("psnr", "standard")


def shared_scores(first: Line, second: Line) -> pd.DataFrame:
    """PSNR (standard) `first` and `second` of the images that both lines scored, by their ids.

    shared_scores(april, ours)["first"].mean()     # April's PSNR where ours was scored too
    """
    sides = {"first": first.scored(*PSNR), "second": second.scored(*PSNR)}
    return pd.concat(sides, axis=1, join="inner")


# the paper's Table 5 as printed -------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedRow:
    """One printed row; accuracy in percent, PSNR in dB."""

    group: int  # (1)-(4)
    model: str
    setting: str
    acc: float
    mse: float
    fft2d: float
    psnr: float
    ssim: float
    lpips: float
    repeats: bool = False  # the five scores of another row, digit for digit

    @property
    def label(self) -> str:
        """The row's name, such as `(2) DeiT-S b`."""
        return f"({self.group}) {self.model} {self.setting}"


TABLE5 = (
    PublishedRow(1, "ViT-S", "a", 78.1, 0.0278, 0.0039, 19.27, 0.5203, 0.3623),
    PublishedRow(1, "DeiT-S", "a", 79.8, 0.0350, 0.0057, 18.94, 0.5182, 0.3767),
    PublishedRow(1, "DeiT-S (w/o PEs)", "a", 77.5, 0.0379, 0.0082, 20.22, 0.5912, 0.2692),
    PublishedRow(1, "DeiT-S+MJP", "a", 80.5, 0.1055, 0.0166, 11.52, 0.4053, 0.6545),
    PublishedRow(2, "ViT-S", "b", 18.7, 0.0327, 0.0016, 18.44, 0.6065, 0.2836),
    PublishedRow(2, "DeiT-S", "b", 36.0, 0.0391, 0.0024, 17.60, 0.5991, 0.3355),
    PublishedRow(2, "DeiT-S (w/o PEs)", "b", 77.5, 0.0379, 0.0025, 20.25, 0.6655, 0.2370),
    PublishedRow(2, "DeiT-S+MJP", "b", 62.9, 0.1043, 0.0059, 11.66, 0.4493, 0.6519),
    PublishedRow(
        *(3, "DeiT-S+MJP (w/o)", "a", 40.6, 0.1043, 0.0059, 11.66, 0.4493, 0.6519),
        repeats=True,  # those of (2) DeiT-S+MJP b
    ),
    PublishedRow(4, "DeiT-S+MJP", "c", 62.9, 0.1706, 0.0338, 8.07, 0.0875, 0.8945),
)


def published_row(model: str, setting: str) -> PublishedRow:
    """The printed row of a model in a setting, as in `published_row("DeiT-S", "b")`."""
    by_name = {f"{row.model} {row.setting}": row for row in TABLE5}
    if row := by_name.get(f"{model} {setting}"):
        return row
    raise unknown_name("paper_row of the paper's Table 5", f"{model} {setting}", by_name)


# the table of all lines ---------------------------------------------------------------------------

VARIANTS = ("paper", "standard")

IDENTITY = ("model", "architecture", "setting", "gamma", "trained_gamma", "attack", "dtype")

NOT_COLUMNS = frozenset(
    (
        *(*IDENTITY, "run_id", "cell_key", "seed", "status", "reason", "notes", "paper_row"),
        *("checkpoint", "checkpoint_sha", "victim", "data", "data_is_papers", "labels"),
        *("true_labels", "mean", "std", "resize", "interpolation", "planned_images", "role"),
    )
)
"""Cell entries that have a column of their own already, or a place in the notes."""


@dataclass(frozen=True)
class Table:
    """One variant of the metrics for every line."""

    variant: str
    frame: pd.DataFrame  # one row per line
    varying: tuple[str, ...]  # the further cell entries in which the lines differ


def build_tables(lines: Sequence[Line], derived: Sequence[DerivedLine] = ()) -> tuple[Table, ...]:
    """The tables of all VARIANTS."""
    varying = varying_columns(lines)
    rows: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    measures = [
        name for name in (*MEANS, *MEDIANS) if any(x.count(name, DIAGNOSTIC) for x in lines)
    ]
    for line in (*lines, *derived):
        known, bounds, measured = _facts(line, varying), _bounds(line), _measured(line, measures)
        for variant, of_variant in rows.items():
            scores, shares = _scores(line, variant)
            of_variant.append({**known, **scores, **bounds, **shares, **measured})
    return tuple(Table(v, pd.DataFrame.from_records(of), varying) for v, of in rows.items())


def varying_columns(lines: Sequence[Line]) -> tuple[str, ...]:
    """Scalar cell entries (seed first) in which lines differ and that have no column otherwise.

    Failed cells are ignored, since they may have failed before their entries were known. Controls
    are ignored for the entries of attacks: they have no options and see no upload.
    """
    described = [line for line in lines if line.cell.status != "failed"]
    cells = [line.cell.columns for line in described]
    attacks = [line.cell.columns for line in described if line.cell.role == "attack"]
    keys = dict.fromkeys(key for cell in cells for key in cell if key not in NOT_COLUMNS)
    if all(line.cell.known_as == line.attack for line in described):
        keys.pop("attack_name", None)  # it would repeat the labels
    return tuple(
        key
        for key in ["seed", *keys]
        if len({fact(cell, key) for cell in (attacks if key in ATTACK_FACTS else cells)}) > 1
    )


def _facts(line: Line, varying: Sequence[str]) -> dict[str, Any]:
    """What a line is; of the attack's facts, derived lines have only the number of uploads and
    controls have none."""
    foreign = set() if line.cell.role == "attack" else {*ATTACK_FACTS}
    if isinstance(line, DerivedLine):
        foreign.remove("uploads")
    cell = line.cell.columns
    return {
        **{"line": line.number, "run": line.run, "run_id": line.cell.run_id},
        **{key: cell.get(key) for key in IDENTITY},
        "seed": line.cell.seed,
        **{key: None if key in foreign else fact(cell, key) for key in varying if key != "seed"},
        **{"status": line.status, "reason": line.reason},
    }


def _scores(line: Line, variant: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Counts of images by PSNR or else the first other score, accuracy in percent, of the model as
    trained and of the one that the attack met, and the five scores. Then the shares of images from
    a PSNR on."""
    computed = (metric for metric in ("psnr", *METRICS) if (metric, variant) in line.keys)
    counts = summary(line, next(computed, "psnr"), variant).counts
    intact, altered = accuracies(line)
    values: dict[str, Any] = {"n": counts.ok, "n_failed": counts.failed}
    values |= {"n_unsupported": counts.unsupported, "n_unscored": counts.unscored}
    values |= {"n_not_run": line.not_run, **_columns("acc", intact, scale=100)}
    values |= _columns("acc_altered", altered, scale=100)
    for metric in METRICS:
        values |= _columns(metric, summary(line, metric, variant))
        if metric == "psnr":
            values["psnr_median"] = capped_median(line, metric, variant)
            values["psnr_exact"] = len(line.exact_images)
            values["psnr_at_20"] = success_share(line, 20, variant).count
    shares = {x: success_share(line, x, variant).percent for x in THRESHOLDS}
    return values, {f"psnr_from_{limit}": percent for limit, percent in shares.items()}


def _columns(name: str, score: Summary, *, scale: float = 1) -> dict[str, Any]:
    """The columns of one score."""
    figures = {"mean": score.mean, "lo": score.low, "hi": score.high}
    columns = {f"{name}_{part}": scale * value for part, value in figures.items()}
    return {**columns, f"{name}_n": score.n}


def _bounds(line: Line) -> dict[str, Any]:
    """What bounds a line: the grey, the ceiling where it inverts the embedding by minimum norm, and
    the linear system of its attack."""
    reached, grey = _beside(line, "grey_psnr")
    bounded = line.cell.role == "ceiling" or "rank" in line.traits
    under, ceiling = np.minimum(_beside(line, "ceiling_psnr"), PSNR_CAP)
    distance = float(np.mean(ceiling - under)) if bounded and len(ceiling) else math.nan
    medians = ("cond_a", "rank_a", "nonzero_rows", "zero_rows", "shuffled_patches")
    empty = line.scored("empty_mask", DIAGNOSTIC)
    below = 100 * float((reached < grey).mean()) if len(grey) else math.nan
    return {
        "grey_mean": mean_of(line, "grey_psnr"),
        **{"below_grey": below, "below_grey_n": len(grey)},
        "in_place_mean": mean_of(line, "oracle_in_place_psnr"),
        "ceiling_mean": mean_of(line, "ceiling_psnr") if bounded else math.nan,
        "ceiling_n": line.count("ceiling_psnr", DIAGNOSTIC) if bounded else 0,
        "ceiling_distance": distance,
        **{f"{name}_median": capped_median(line, name, DIAGNOSTIC) for name in medians},
        "empty_masks": int((empty > 0).sum()) if len(empty) else None,
        "role": line.cell.role,
        "chosen": json.dumps(line.counts) if isinstance(line, DerivedLine) else None,
    }


def _measured(line: Line, measures: Sequence[str]) -> dict[str, Any]:
    """The figures of the measures, then of how many images each is."""
    figures = {f"{name}_mean": mean_of(line, name) for name in measures if name in MEANS}
    medians = {name: capped_median(line, name, DIAGNOSTIC) for name in measures if name in MEDIANS}
    figures |= {f"{name}_median": value for name, value in medians.items()}
    return figures | {f"{name}_n": line.count(name, DIAGNOSTIC) for name in measures}
