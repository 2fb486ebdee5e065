"""Loss and accuracy over the epochs as in Fig. 6 of the paper, several runs in one picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mjp_privacy.core.drawing import colour, drawn, picture
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import is_there
from mjp_privacy.core.text import shown
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


def draw_curves(runs: Sequence[Path], out: Path, labels: Sequence[str] | None = None) -> Path:
    """Write curves.png into `out`: training loss on the left, validation on the right: top-1 or, of
    a segmentation, mIoU.

    labels: names of the runs in the legend; None: their folders' names.
    """
    path = out / "curves.png"
    measures: set[str] = set()
    with picture(path, 9, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        for number, run in enumerate(runs):
            points = _points(run / METRICS)
            if damaged := whole_lines(run / METRICS)[1]:
                told = (
                    f"{shown(run / METRICS)}: {damaged} damaged line(s) are left out of the curves"
                )
                print(told, file=sys.stderr, flush=True)
            if not points:
                continue  # a run that has only just begun
            look = {"color": colour(number), "linewidth": 1}
            label = drawn(labels[number] if labels else run.resolve().name)
            epochs = [point.epoch for point in points]
            left.plot(epochs, [point.cross_entropy for point in points], label=label, **look)
            measured = [point for point in points if point.validated is not None]
            measures |= {"mIoU" if point.val_miou is not None else "top-1" for point in measured}
            epochs, scores = [p.epoch for p in measured], [p.validated for p in measured]
            right.plot(epochs, scores, marker="o", markersize=3, **look)
        left.set_title("training cross-entropy")
        right.set_title(f"validation {' and '.join(sorted(measures)) or 'top-1'} (%)")
        for axes in (left, right):
            axes.set_xlabel("epoch")
        left.legend()
    return path
