"""Errors of a model under each corruption and severity, and their mean, mCE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.data import ImageError, ImageSource, Preprocessing, spread_subset
from mjp_privacy.data.corruptions.names import CORRUPTIONS
from mjp_privacy.models import LoadedModel
from mjp_privacy.training.robustness.layouts import (
    Cell,
    CorruptionFolders,
    check_same_images,
    open_cell,
)
from mjp_privacy.training.robustness.line import Line, mean, share
from mjp_privacy.training.robustness.predictions import answers
from mjp_privacy.training.robustness.published import PublishedRobustness
from mjp_privacy.training.robustness.scores import ALEXNET, ALEXNETS_CLASSES

UNNORMALISED, NORMALISED = "mCE, unnormalised", "mCE against AlexNet"
AGAINST_ALEXNET = "CE against AlexNet"


def errors_by_cell(
    model: LoadedModel,
    folders: CorruptionFolders,
    prepare: Preprocessing,
    *,
    limit: int | None = None,
    seed: int = 0,
    check: Callable[[ImageSource], object] = lambda source: None,
    progress: Callable[[int], object] = lambda done: None,
    unreadable: Callable[[ImageSource, ImageError], object] = lambda source, error: None,
) -> pd.DataFrame:
    """1 for a wrong answer and 0 for a right one: a row for each image, a column for each
    (corruption, severity); NaN where the file cannot be read.

    limit       the same images of every cell
    check       called with the images of each cell before they are shown to the model
    progress    called after each batch with the number of its images
    unreadable  called with the cell's images and the reason of each that cannot be read
    """
    columns: dict[tuple[str, int], pd.Series] = {}
    first = None
    for cell in folders.by_cell:
        source = open_cell(folders, cell)
        first = first or source.records
        check_same_images(folders, cell, source, first)
        check(source)
        records = spread_subset(source.records, limit, seed)
        note = partial(unreadable, source)
        rows = answers(model, source, records, prepare, progress=progress, unreadable=note)
        columns[cell] = 1 - rows.set_index("image_id")["correct"]
    return pd.DataFrame(columns).sort_index()


def number_of_images(folders: CorruptionFolders, limit: int | None) -> int:
    """How many images `errors_by_cell` shows to a model: as many of every cell."""
    one = len(open_cell(folders, next(iter(folders.by_cell))).records)
    return len(folders.by_cell) * (one if limit is None else min(limit, one))


def corruption_lines(
    label: str,
    images: str,
    errors: pd.DataFrame,
    paper: PublishedRobustness | None = None,
    *,
    classes: int = ALEXNETS_CLASSES,
) -> list[Line]:
    """All lines of a model: a cell each, a mean over severities each, and mCE where all 15
    corruptions are there.

    classes  how many the model has; without AlexNet's, nothing stands against its errors
    """
    lines = [
        Line(label, images, "error", share(_values(errors, (name, severity))), name, severity)
        for name, severity in cells_of(errors)
    ]
    means = of_corruptions(errors)
    printed = paper.errors if paper else {}
    for name, values in means.items():
        figure = mean(values, whole=100)
        lines.append(Line(label, images, "mean error", figure, name, paper=printed.get(name)))
        if classes == ALEXNETS_CLASSES:
            against = figure.times(100 / ALEXNET[name])
            lines.append(Line(label, images, AGAINST_ALEXNET, against, name))
    if set(means) == set(CORRUPTIONS):
        plain, normal = mce_of_images(means)
        unnormalised = paper.mce_unnormalised if paper else None
        normalised = paper.mce if paper else None
        lines.append(Line(label, images, UNNORMALISED, mean(plain, whole=100), paper=unnormalised))
        if classes == ALEXNETS_CLASSES:
            all_wrong = float(np.mean([10_000 / ALEXNET[name] for name in CORRUPTIONS]))
            figure = mean(normal, whole=all_wrong)
            lines.append(Line(label, images, NORMALISED, figure, paper=normalised))
    return lines


def difference_lines(
    label: str,
    images: str,
    errors: pd.DataFrame,
    other: str,
    others: pd.DataFrame,
    *,
    classes: int = ALEXNETS_CLASSES,
) -> list[Line]:
    """How much larger the model's mCE is than another's, over the same images; none where a
    corruption is missing, and none against AlexNet where its classes are not the model's."""
    means, means_of_other = of_corruptions(errors), of_corruptions(others)
    if set(means) != set(CORRUPTIONS):
        return []
    pairs = zip(mce_of_images(means), mce_of_images(means_of_other), strict=True)
    lines = [
        Line(label, images, f"{name}, difference to {other}", mean(ours - theirs))
        for name, (ours, theirs) in zip((UNNORMALISED, NORMALISED), pairs, strict=True)
    ]
    return lines if classes == ALEXNETS_CLASSES else lines[:1]


def cells_of(errors: pd.DataFrame) -> list[Cell]:
    """The corruptions and severities of the columns."""
    return [(str(column[0]), int(column[1])) for column in errors.columns.tolist()]


def of_corruptions(errors: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """By corruption, each image's mean error over the severities in percent."""
    names = dict.fromkeys(name for name, _ in cells_of(errors))
    return {name: 100 * _of_name(errors, name).mean(axis=0) for name in names}


def mce_of_images(
    means: Mapping[str, NDArray[np.float64]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Each image's share in mCE, unnormalised and against AlexNet: their means are the two mCE."""
    plain = np.mean([means[name] for name in CORRUPTIONS], axis=0)
    normal = np.mean([100 * means[name] / ALEXNET[name] for name in CORRUPTIONS], axis=0)
    return plain, normal


def wrong_severities(errors: pd.DataFrame, label: str) -> pd.DataFrame:
    """By image and corruption, at how many of the five severities the answer is wrong; empty where
    a file cannot be read."""
    names = dict.fromkeys(name for name, _ in cells_of(errors))
    counts = {name: _of_name(errors, name).sum(axis=0) for name in names}
    table = pd.DataFrame(counts, index=errors.index).astype("Int64").rename_axis("image_id")
    table.insert(0, "model", label)
    return table


def _of_name(errors: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """(severities, images) of one corruption."""
    return np.stack([_values(errors, cell) for cell in cells_of(errors) if cell[0] == name])


def _values(errors: pd.DataFrame, cell: Cell) -> NDArray[np.float64]:
    return errors[cell].to_numpy(dtype=np.float64)
