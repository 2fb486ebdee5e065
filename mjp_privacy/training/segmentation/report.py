"""The table of `mjp evaluate --ade20k`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from mjp_privacy.training.segmentation.published import CAVEAT, PublishedSegmentation
from mjp_privacy.training.segmentation.scores import MEASURES, Score

HEADS = (
    *("Model", "head", "n", "classes", "mIoU %", "mAcc %", "aAcc %"),
    *("mIoU − first", "paper's mIoU (Δ)", "paper's mAcc (Δ)"),
)
NOTES = (
    "Pixel counts of each class are summed over the n pictures, then divided: mIoU is the mean "
    "over the classes in truth or answer, mAcc over those in the truth (`classes`), aAcc the share "
    "of all labelled pixels, as in MMSegmentation. Pixels without a label do not count.",
    "[95 % interval]: bootstrap over pictures; a resample without a rare class averages over the "
    "others. Each line is one trained model; the interval does not cover another training. mIoU − "
    "first: minus the first model's, on the same pictures, resampled together.",
    "Sliding windows of the training size, two thirds of it apart, on pictures whose short side "
    "has that size; one scale, not mirrored; answers compared at the label maps' own size.",
)


@dataclass(frozen=True)
class Segmented:
    """One model's scores on n pictures; `unreadable` says why others have none."""

    label: str
    head: str
    scores: Mapping[str, Score]
    n: int
    classes: int
    unreadable: Mapping[str, str]  # why, by the picture
    paper: PublishedSegmentation | None
    over_first: Score | None = None
    """mIoU minus the first model's, where both are of the same pictures."""


def table_of(models: Sequence[Segmented]) -> pd.DataFrame:
    """A line for each model, as segmentation.csv has it."""
    lines = []
    for model in models:
        line: dict[str, object] = {"model": model.label, "head": model.head, "n": model.n}
        line |= {"failed": len(model.unreadable), "classes": model.classes}
        for name in MEASURES:
            score = model.scores[name]
            line |= {name: score.percent, f"{name}_low": score.low, f"{name}_high": score.high}
        over = model.over_first or Score(math.nan, math.nan, math.nan)
        line |= {"miou_over_first": over.percent}
        line |= {"miou_over_first_low": over.low, "miou_over_first_high": over.high}
        paper = model.paper
        line["paper_row"] = paper.model if paper else ""
        line["paper_miou"], line["paper_macc"] = (paper.miou, paper.macc) if paper else (None, None)
        lines.append(line)
    return pd.DataFrame(lines)


def markdown(models: Sequence[Segmented]) -> str:
    """The models' scores with the paper's beside them, and notes below."""
    rows = [HEADS, ("---",) * len(HEADS), *(_cells(model) for model in models)]
    notes = [CAVEAT] if any(model.paper for model in models) else []
    for model in models:
        if model.unreadable:
            number = len(model.unreadable)
            pictures, have = ("picture", "has") if number == 1 else ("pictures", "have")
            notes.append(
                f"{model.label}: {number} {pictures} could not be read and {have} no part in the "
                f"scores; the first: {next(iter(model.unreadable.values()))}."
            )
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in (*NOTES, *notes)), ""])


def _cells(model: Segmented) -> tuple[str, ...]:
    n = f"{model.n}" + (f" ({len(model.unreadable)} unreadable)" if model.unreadable else "")
    scores = [_with_interval(model.scores[name]) for name in MEASURES]
    paper = model.paper
    printed = {"miou": paper.miou, "macc": paper.macc} if paper else {}
    beside = [_beside(printed.get(name), model.scores[name]) for name in ("miou", "macc")]
    over = "–" if model.over_first is None else _with_interval(model.over_first, "+.1f")
    label = model.label.replace("|", "\\|")
    return (label, model.head, n, f"{model.classes}", *scores, over, *beside)


def _with_interval(score: Score, form: str = ".1f") -> str:
    if math.isnan(score.percent):
        return "–"
    interval = "" if math.isnan(score.low) else f" [{score.low:{form}}, {score.high:{form}}]"
    return f"{score.percent:{form}}{interval}"


def _beside(printed: float | None, score: Score) -> str:
    return "–" if printed is None else f"{printed:.2f} ({score.percent - printed:+.2f})"
