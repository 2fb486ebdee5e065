"""The folders of ImageNet-C, -A and -O as their authors publish them, and a model's answers.

C     gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG, perhaps inside `noise`, `blur`,
      `weather` and `digital`, as the archives are called
A, O  n01498041/0.000116_digital clock _ digital clock_0.865662.jpg: 200 classes
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing, open_images
from mjp_privacy.data.labels import some, synset_indices
from mjp_privacy.models import LoadedModel
from mjp_privacy.paper.corrupted_folder import classes_of
from mjp_privacy.paper.corruptions import CORRUPTIONS, FAMILIES, MARKER, SEVERITIES

Cell = tuple[str, int]  # corruption and severity

EXAMPLE = "gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG"
CLASSES = 200
OFFICIAL: Mapping[str, tuple[str, int]] = {
    "A": ("f6aa4b23244554d9b864fd715ae20048f6a9686388911b2dfbf1ada01bf0f520", 7500),
    "O": ("39f8e64e8f89efad8fd9615c061abc61695ffbd27793e87199181cb4fb340083", 2000),
}
"""SHA-256 of the sorted synsets, one a line, and number of images of the published sets."""


@dataclass(frozen=True)
class CorruptionFolders:
    """The folder of each corruption and severity; `official` is False for our own corruptions.

    plain_classes: how many classes a model must have, for numbers of plain folders to be its own
    """

    path: Path
    by_cell: Mapping[Cell, Path]
    official: bool
    plain_classes: int | None = None


def corruption_folders(path: Path) -> CorruptionFolders:
    """The cells of ImageNet-C in this folder; UserError if it has another layout."""
    if not path.is_dir():
        got = "a file: unpack it" if path.is_file() else "nothing of this name"
        raise UserError(
            f"--imagenet-c {shown(path)}: expected a folder with files such as {EXAMPLE}; got "
            f"{got}."
        )
    places = {name: place for name in CORRUPTIONS if (place := _folder_of(path, name))}
    if not places:
        raise UserError(
            f"--imagenet-c {shown(path)}: expected folders of corruptions with files such as "
            f"{EXAMPLE}; got {_entries(path)}. Give the folder that the archives were unpacked in."
        )
    for name, place in places.items():
        missing = [str(number) for number in SEVERITIES if not (place / str(number)).is_dir()]
        if missing:
            raise UserError(
                f"--imagenet-c {shown(path)}: {name} has no folder for the severities "
                f"{', '.join(missing)}; expected 1 to 5. Unpack its archive again."
            )
    cells = {
        (name, severity): place / str(severity)
        for name, place in places.items()
        for severity in SEVERITIES
    }
    _check_same_classes(path, cells)
    return CorruptionFolders(path, cells, not (path / MARKER).exists(), classes_of(path))


def _folder_of(path: Path, name: str) -> Path | None:
    family = next(family for family, names in FAMILIES.items() if name in names)
    return next((place for place in (path / name, path / family / name) if place.is_dir()), None)


def _entries(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return some(names) if names else "an empty folder"


def _check_same_classes(path: Path, cells: Mapping[Cell, Path]) -> None:
    """Raise unless all cells hold folders of the same names: else one was unpacked in part."""
    of_cell = {
        cell: {entry.name for entry in folder.iterdir() if entry.is_dir()}
        for cell, folder in cells.items()
    }
    fullest = max(of_cell, key=lambda cell: len(of_cell[cell]))
    for cell, names in of_cell.items():
        if lacking := sorted(of_cell[fullest] - names):
            raise UserError(
                f"--imagenet-c {shown(path)}: {_name(cell)} lacks {len(lacking)} of the "
                f"{len(of_cell[fullest])} class folders of {_name(fullest)}: {some(lacking)}. "
                "Expected the same classes everywhere: unpack its archive again."
            )


def open_cell(folders: CorruptionFolders, cell: Cell) -> ImageSource:
    """The labelled images of one corruption and severity."""
    source = open_images(folders.by_cell[cell])
    if source.records[0].label is None:
        raise UserError(
            f"--imagenet-c {shown(folders.path)}: the images of {_name(cell)} lie in no class "
            f"folders. Expected files such as {EXAMPLE}."
        )
    return source


def check_same_images(
    folders: CorruptionFolders, cell: Cell, source: ImageSource, first: Sequence[ImageRecord]
) -> None:
    """Raise unless the cell holds the same images as the first: a mean over cells that hold others
    would be one over images, too."""
    names, others = ({record.image_id for record in records} for records in (source.records, first))
    if names != others:
        raise UserError(
            f"--imagenet-c {shown(folders.path)}: {_name(cell)} holds {len(names)} images, "
            f"{len(names & others)} of them under the names of the first folder's {len(others)}. "
            "Expected the same images under every corruption: unpack its archive again."
        )


def two_hundred_classes(path: Path, letter: str) -> tuple[ImageSource, bool]:
    """The images of ImageNet-A or -O, and whether it is the published set.

    The classes are those of the folders, whose names must be 200 of ImageNet's synsets.
    """
    option = f"--imagenet-{letter.lower()} {shown(path)}"
    source = open_images(path)
    labels = {record.label for record in source.records}
    if source.records[0].label_source != "synset" or len(labels) != CLASSES:
        got = f"{len(labels - {None})} classes. {source.labels_described}"
        raise UserError(
            f"{option}: expected {CLASSES} folders named by synsets, such as n01498041; got {got} "
            "Give the folder that the archive was unpacked in: answers are restricted to its "
            "classes, so with some of them missing the figures would be others."
        )
    digest, count = OFFICIAL[letter]
    synsets = sorted(synset for synset, index in synset_indices().items() if index in labels)
    same = hashlib.sha256("\n".join(synsets).encode()).hexdigest() == digest
    return source, same and len(source.records) == count


def _name(cell: Cell) -> str:
    return f"{cell[0]}/{cell[1]}"


# answers ------------------------------------------------------------------------------------------

BATCH = 128


@torch.no_grad()
def answers(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    prepare: Preprocessing,
    *,
    classes: Sequence[int] | None = None,
    progress: Callable[[int], object] = lambda done: None,
    unreadable: Callable[[ImageError], object] = lambda error: None,
) -> pd.DataFrame:
    """A row for each image: image_id, label, status, correct, confidence.

    classes     restrict the answer to these: the others' logits are left out before the softmax,
                and `confidence` is the largest of what remains
    progress    called after each batch with the number of its images
    unreadable  called with the reason of each image that cannot be read

    Images are fed as they are: nothing is shuffled or masked. An image that cannot be read has the
    status `failed`.
    """
    among = list(range(model.card.num_classes)) if classes is None else list(classes)
    rows: list[dict[str, object]] = []
    for start in range(0, len(records), BATCH):
        readable, pictures = [], []
        for record in records[start : start + BATCH]:
            try:
                pictures.append(prepare(source.decode(record, min_side=model.patch_size)))
                readable.append(record)
            except ImageError as error:
                unreadable(error)
                rows.append(_row(record, "failed", np.nan, np.nan))
        if readable:
            images = torch.stack(pictures).to(model.like)
            logits = model(model.normalize(images))[:, among].cpu()
            sure, best = logits.double().softmax(-1).max(-1)  # in float32 many would be 1 alike
            for record, share, place in zip(readable, sure.tolist(), best.tolist(), strict=True):
                rows.append(_row(record, "ok", float(among[place] == record.label), share))
        progress(len(records[start : start + BATCH]))
    return pd.DataFrame(rows)


def _row(record: ImageRecord, status: str, correct: float, confidence: float) -> dict[str, object]:
    return {
        "image_id": record.image_id,
        "label": record.label,
        "status": status,
        "correct": correct,
        "confidence": confidence,
    }
