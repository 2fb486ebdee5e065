"""The table as numbers, one row per line. `views.py` turns it into text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attacks import traits_of
from mjp_privacy.metrics.statistics import PSNR_CAP, Summary
from mjp_privacy.report.cell_columns import ATTACK_FACTS, Scalar, fact
from mjp_privacy.report.lines import (
    THRESHOLDS,
    Line,
    Measure,
    below_grey,
    ceiling_distance,
    image_counts,
    measured,
    not_run,
    present,
    shared_scores,
    success,
    success_share,
    summary,
)
from mjp_privacy.report.published import METRICS, PublishedRow, published_row
from mjp_privacy.report.worst_case import DerivedLine
from mjp_privacy.training.published import is_papers_model

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


def build_table(lines: Sequence[Line], variant: str, derived: Sequence[DerivedLine] = ()) -> Table:
    """The table of one variant of the metrics; accuracies in percent, PSNR in dB."""
    return build_tables(lines, derived)[VARIANTS.index(variant)]


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
