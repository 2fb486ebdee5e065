"""Loss and accuracy over the epochs as in Fig. 6 of the paper, several runs in one picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.read import is_there
from mjp_privacy.core.text import shown
from mjp_privacy.training.drawing import colour, drawn, plain_texts
from mjp_privacy.training.journal import LINES, METRICS, whole_lines

Finite = Annotated[float, Field(strict=True, ge=-1e12, le=1e12)]
Percent = Annotated[float, Field(strict=True, ge=0, le=100)]


@dataclass(frozen=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class _Point:
    """What a line of metrics.jsonl adds to the curves."""

    epoch: Annotated[float, Field(strict=True, ge=0, le=1e12)]
    cross_entropy: Finite
    val_top1: Percent | None = None
    val_miou: Percent | None = None

    @property
    def validated(self) -> float | None:
        """The validation's score: top-1, or mIoU of a segmentation."""
        return self.val_top1 if self.val_miou is None else self.val_miou


def _points(path: Path) -> list[_Point]:
    """The points of a run, without lines that are damaged; none of a run that only just began.

    UserError where the file has lines and none of them is a training's.
    """
    lines, damaged = whole_lines(path)
    points = []
    for line in lines:
        with suppress(ValidationError):
            points.append(_POINT.validate_python(line))
    if not points and (lines or damaged):
        raise LINES.refusal(path, f"{len(lines) + damaged} lines of something else")
    return points


_POINT = TypeAdapter(_Point)


def check_runs(runs: Sequence[Path]) -> None:
    """Raise unless every folder is a training run's."""
    for run in runs:
        if not is_there(run / METRICS):
            raise UserError(f"No {METRICS} in {shown(run)}: expected the folder of a training run.")
        _points(run / METRICS)


def check_drawable(runs: Sequence[Path]) -> None:
    """Raise unless every folder is a training run's, and one of them has something to draw."""
    check_runs(runs)
    if not runs:
        raise UserError("mjp curves: expected the folder of a training run, got none.")
    if not any(_points(run / METRICS) for run in runs):
        raise UserError(
            f"{shown(runs[0] / METRICS)}: expected the journal of a training run, got no line of "
            "one. Give it the time of an epoch, or another folder."
        )


@plain_texts()
def draw_curves(runs: Sequence[Path], out: Path, labels: Sequence[str] | None = None) -> Path:
    """Write curves.png into `out`: training loss on the left, validation on the right: top-1 or, of
    a segmentation, mIoU.

    labels: names of the runs in the legend; None: their folders' names.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    measures: set[str] = set()
    for number, run in enumerate(runs):
        points = _points(run / METRICS)
        if damaged := whole_lines(run / METRICS)[1]:
            words = f"{shown(run / METRICS)}: {damaged} damaged line(s) are left out of the curves"
            print(words, file=sys.stderr, flush=True)
        if not points:
            continue  # a run that has only just begun
        shade = colour(number)
        label = labels[number] if labels else run.resolve().name
        left.plot(
            [point.epoch for point in points],
            [point.cross_entropy for point in points],
            color=shade,
            linewidth=1,
            label=drawn(label),
        )
        measured = [point for point in points if point.validated is not None]
        measures |= {"mIoU" if point.val_miou is not None else "top-1" for point in measured}
        right.plot(
            [point.epoch for point in measured],
            [point.validated for point in measured],
            color=shade,
            marker="o",
            markersize=3,
            linewidth=1,
            label=drawn(label),
        )
    validation = f"validation {' and '.join(sorted(measures)) or 'top-1'} (%)"
    for axes, name in ((left, "training cross-entropy"), (right, validation)):
        axes.set_xlabel("epoch")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=8, frameon=False)
    path = out / "curves.png"
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))
    return path
