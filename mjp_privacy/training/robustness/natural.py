"""ImageNet-A: photographs that models get wrong. ImageNet-O: of things that no class is for.

In both, answers are restricted to the 200 classes of the folders, as their authors' code does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing
from mjp_privacy.models import LoadedModel
from mjp_privacy.training.robustness.line import RESAMPLED, Figure, Line, share
from mjp_privacy.training.robustness.predictions import answers
from mjp_privacy.training.robustness.published import PublishedRobustness
from mjp_privacy.training.robustness.scores import (
    accuracy_when_answering,
    average_precision,
    resampled_interval,
    rms_calibration,
)

Progress = Callable[[int], object]


def hard_lines(
    label: str,
    images: str,
    rows: pd.DataFrame,
    paper: PublishedRobustness | None,
) -> list[Line]:
    """Accuracy, AURRA and RMS calibration error of answers to ImageNet-A."""
    confidence, correct = _of_read(rows, "confidence"), _of_read(rows, "correct")
    failed = len(rows) - len(correct)
    accuracy = share(rows["correct"].to_numpy(dtype=float))
    printed = (paper.accuracy, paper.aurra) if paper else (None, None)
    lines = [Line(label, images, "accuracy", accuracy, paper=printed[0])]
    ends = resampled_interval(accuracy_when_answering, (confidence, correct))
    answering = accuracy_when_answering(confidence, correct)
    figure = _resampled(answering, ends, len(correct), failed)
    lines.append(Line(label, images, "AURRA", figure, paper=printed[1]))
    # no interval: resampling adds to the noise in a bin what the error is a root of, and the
    # percentiles lie above the estimate
    calibration = 100 * rms_calibration(confidence, correct)
    figure = Figure(calibration, math.nan, math.nan, "", len(correct), failed)
    return [*lines, Line(label, images, "RMS calibration error", figure)]


def strange_lines(
    label: str,
    images: str,
    strange: pd.DataFrame,
    ordinary: pd.DataFrame,
    paper: PublishedRobustness | None,
) -> list[Line]:
    """AUPR of telling ImageNet-O's images by the model's doubt, and what chance would get."""
    doubts = [-_of_read(rows, "confidence") for rows in (strange, ordinary)]
    failed = len(strange) + len(ordinary) - len(doubts[0]) - len(doubts[1])
    ends = resampled_interval(average_precision, (doubts[0],), (doubts[1],))
    total = len(doubts[0]) + len(doubts[1])
    figure = _resampled(average_precision(*doubts), ends, total, failed)
    chance = Figure(100 * len(doubts[0]) / total, math.nan, math.nan, "", total, failed)
    printed = paper.aupr if paper else None
    return [
        Line(label, images, "AUPR", figure, paper=printed),
        Line(label, images, "AUPR by chance", chance),
    ]


def of_classes(source: ImageSource, classes: Sequence[int]) -> tuple[ImageRecord, ...]:
    """The images of --data that belong to ImageNet-O's classes."""
    wanted = set(classes)
    records = tuple(record for record in source.records if record.label in wanted)
    if not records:
        raise UserError(
            "--data holds no image of ImageNet-O's 200 classes: expected photographs of these, as "
            f"ImageNet's validation set has them. {source.labels_described}"
        )
    return records


def answered(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    prepare: Preprocessing,
    classes: Sequence[int],
    progress: Progress,
    unreadable: Callable[[ImageError], object] = lambda error: None,
) -> pd.DataFrame:
    """The model's answers among these classes; UserError where no image can be read."""
    errors: list[ImageError] = []

    def note(error: ImageError) -> None:
        errors.append(error)
        unreadable(error)

    rows = answers(
        model, source, records, prepare, classes=classes, progress=progress, unreadable=note
    )
    if not (rows["status"] == "ok").any():
        raise UserError(
            f"None of the {len(rows)} images of {source.path.name} can be read, the first of them "
            f"for: {errors[0]}. Expected at least one: unpack the archive again, or mend that."
        )
    return rows


def _of_read(rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
    return rows.loc[rows["status"] == "ok", column].to_numpy(dtype=np.float64)


def _resampled(value: float, ends: tuple[float, float], n: int, failed: int) -> Figure:
    return Figure(100 * value, 100 * ends[0], 100 * ends[1], RESAMPLED, n, failed)
