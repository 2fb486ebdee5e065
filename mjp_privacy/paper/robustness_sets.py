"""The folders of ImageNet-C, -A and -O as their authors publish them, and a model's answers.

C     gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG, perhaps inside `noise`, `blur`,
      `weather` and `digital`, as the archives are called
A, O  n01498041/0.000116_digital clock _ digital clock_0.865662.jpg: 200 classes
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.text import shown
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing, open_images
from mjp_privacy.data.files import image_names, open_files
from mjp_privacy.data.labels import some, synset_indices
from mjp_privacy.models import LoadedModel
from mjp_privacy.paper.corrupted_folder import classes_of
from mjp_privacy.paper.corruptions import FAMILIES, MARKER, SEVERITIES

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

    images         those of the first folder; the others hold files of the same names
    plain_classes  how many classes a model must have, for numbers of plain folders to be its own
    """

    by_cell: Mapping[Cell, Path]
    images: ImageSource
    official: bool
    plain_classes: int | None


def corruption_folders(path: Path) -> CorruptionFolders:
    """The cells of ImageNet-C in this folder; UserError if it has another layout."""
    places = {
        name: place
        for family, names in FAMILIES.items()
        for name in names
        for place in (path / family / name, path / name)
        if place.is_dir()
    }
    cells = {(name, level): places[name] / str(level) for name in places for level in SEVERITIES}
    if not cells:
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        raise UserError(
            f"--imagenet-c {shown(path)}: expected folders of corruptions with files such as "
            f"{EXAMPLE}; got {some(names) if names else 'no folder'}. Give the folder that the "
            "archives were unpacked in."
        )
    first = next(iter(cells.values()))
    wanted = _images_in(first)
    for (name, severity), folder in cells.items():
        names_here = _images_in(folder)
        if names_here != wanted:
            raise UserError(
                f"--imagenet-c {shown(path)}: {name}/{severity} holds {len(names_here)} images, "
                f"{len(wanted & names_here)} of them under the names of the first folder's "
                f"{len(wanted)}. Expected the same images under every corruption at the severities "
                "1 to 5: unpack its archive again."
            )
    images = open_images(first)
    if images.records[0].label is None:
        raise UserError(
            f"--imagenet-c {shown(path)}: the images of {first.relative_to(path)} lie in no class "
            f"folders. Expected files such as {EXAMPLE}."
        )
    return CorruptionFolders(cells, images, not (path / MARKER).exists(), classes_of(path))


def _images_in(folder: Path) -> set[str]:
    return set(image_names(open_files(folder))) if folder.is_dir() else set()


def two_hundred_classes(path: Path, letter: str) -> tuple[ImageSource, bool]:
    """The images of ImageNet-A or -O, and whether it is the published set.

    The classes are those of the folders, whose names must be 200 of ImageNet's synsets.
    """
    source = open_images(path)
    labels = {record.label for record in source.records}
    if source.records[0].label_source != "synset" or len(labels) != CLASSES:
        got = f"{len(labels - {None})} classes. {source.labels_described}"
        raise UserError(
            f"--imagenet-{letter.lower()} {shown(path)}: expected {CLASSES} folders named by "
            f"synsets, such as n01498041; got {got} Give the folder that the archive was unpacked "
            "in: answers are restricted to its classes, so with some of them missing the figures "
            "would be others."
        )
    digest, count = OFFICIAL[letter]
    synsets = sorted(synset for synset, index in synset_indices().items() if index in labels)
    same = hashlib.sha256("\n".join(synsets).encode()).hexdigest() == digest
    return source, same and len(source.records) == count


# answers ------------------------------------------------------------------------------------------

BATCH = 128


@torch.no_grad()
def answers(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    prepare: Preprocessing,
    bar: Progress,
    unreadable: dict[str, str],
    classes: Sequence[int] | None = None,
) -> pd.DataFrame:
    """A row for each image: image_id, correct and confidence, NaN where it cannot be read.

    bar         counts the images
    unreadable  gains the reason of each image that cannot be read, by its path
    classes     restrict the answer to these: the others' logits are left out before the softmax,
                and `confidence` is the largest of what remains

    Images are fed as they are: nothing is shuffled or masked.
    """
    among = list(range(model.card.num_classes)) if classes is None else list(classes)
    rows: list[tuple[str, float, float]] = []
    for start in range(0, len(records), BATCH):
        readable, pictures = [], []
        for record in records[start : start + BATCH]:
            try:
                pictures.append(prepare(source.decode(record, min_side=model.patch_size)))
                readable.append(record)
            except ImageError as error:
                unreadable[str(source.path / record.image_id)] = error.reason
                rows.append((record.image_id, np.nan, np.nan))
        if readable:
            images = torch.stack(pictures).to(model.like)
            logits = model(model.normalize(images))[:, among].cpu()
            sure, best = logits.double().softmax(-1).max(-1)  # in float32 many would be 1 alike
            for record, share, place in zip(readable, sure.tolist(), best.tolist(), strict=True):
                rows.append((record.image_id, float(among[place] == record.label), share))
        bar.advance(len(records[start : start + BATCH]))
    return pd.DataFrame(rows, columns=["image_id", "correct", "confidence"])
