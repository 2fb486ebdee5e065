"""The sets of the robustness tables: ImageNet-C, -A and -O, folders made like C, and the answers.

As their authors publish them:

C     gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG, perhaps inside `noise`, `blur`,
      `weather` and `digital`, as the archives are called
A, O  n01498041/0.000116_digital clock _ digital clock_0.865662.jpg: 200 classes

`mjp sample --corrupt` makes a folder in C's layout of a sample of anybody's images:

OUT/<corruption>/<severity>/<class>/<name>.JPEG
OUT/corrupted.json    seed, size, what differs from the official files, and how many classes there
                      were where plain folders were numbered in sorted order
OUT/images.csv        file,label,image_id,sha256 of each image that was corrupted
OUT/skipped.csv       file,label,reason: candidates that could not be read

A class is called by its synset where the images show it, else by its number.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import pandas as pd
import torch
from PIL import Image

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import FileKind, json_value
from mjp_privacy.core.text import shown
from mjp_privacy.data import ImageRecord, ImageSource, Preprocessing, open_images
from mjp_privacy.data.files import image_names, open_files
from mjp_privacy.data.labels import is_class_index, is_synset, some, synset_indices
from mjp_privacy.data.sample import Sample, choose, csv_text, refuse_out, remarks
from mjp_privacy.models import LoadedModel
from mjp_privacy.paper.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES, corrupted
from mjp_privacy.training.evaluation import opened_batches

# a folder like ImageNet-C -------------------------------------------------------------------------

MARKER = "corrupted.json"
"""A file that `mjp sample --corrupt` leaves in its folder; official files have none."""

DIFFERENCES = (
    "The code is written anew over NumPy, SciPy and Pillow after the paper and the official "
    "generator's constants; its random numbers are others, so no picture equals an official file.",
    "Frost is a computed texture of bright, bluish needles; the official code adds parts of "
    "photographs of frost.",
    "The trails of motion blur and snow are summed here from whole pixels; the official code calls "
    "ImageMagick.",
    "Defocus blur and the elastic transform's affine map are computed with SciPy; the official "
    "code calls OpenCV.",
    "Lengths in pixels are the official ones, made for a side of 224, whatever the size; those of "
    "the elastic transform grow with the side.",
    "Chance depends on the seed, the image's class and name, the corruption and the severity; the "
    "official code draws all pictures from one stream.",
)


PLAIN = "plain_class_folders"
SMALLEST, LARGEST = 32, 1024
"""Pixels a side."""
QUALITY = 85
"""Of the JPEG files, as the official ones have it."""
DESCRIPTION = FileKind("a list that `mjp sample --corrupt` wrote", "Give another --out.", 1 << 30)


def make_corrupted(
    source: ImageSource,
    out: Path,
    *,
    per_class: int,
    limit: int | None,
    seed: int,
    size: int,
    progress: Callable[[Sequence[int]], Iterable[int]],
) -> Outcome:
    """Write every image of a sample under every corruption and severity; lines on what was done.

    Files that are there already are left: the same command goes on where it was stopped.
    """
    if not SMALLEST <= size <= LARGEST:
        raise UserError(
            f"--size is a side in pixels: expected {SMALLEST} to {LARGEST}, got {size}."
        )
    refuse_out(source.path, out)
    sample = choose(source, per_class=per_class, limit=limit, seed=seed, progress=progress)
    records = [record for record, _ in sample.chosen]
    places = _places(records)
    lists = _lists(source, sample, places, seed, size)
    if out.is_dir() and any(out.iterdir()):
        for name, content in lists.items():
            if not (out / name).is_file() or DESCRIPTION.bytes(out / name) != content:
                raise UserError(
                    f"{shown(out)} is not empty and holds something other than these images "
                    "corrupted with this seed and size. Expected a new or empty folder, or one "
                    "where the same command was stopped: give another --out, or move the files "
                    "away."
                )
    output_folder(out)
    for name, content in lists.items():
        write_atomically(out / name, partial(Path.write_bytes, data=content))
    new = 0
    with Progress("corrupting", len(records), "images") as bar:
        for record in records:
            new += _corrupt(source, record, out, places[record], seed, size)
            bar.advance()
    lines = [
        f"{shown(out)} holds {len(records)} images under {len(CORRUPTIONS)} corruptions at "
        f"{len(SEVERITIES)} severities; {new} files are new.",
        f"These are not the official files of ImageNet-C; {MARKER} says what differs.",
        *remarks(sample, per_class, source.altered.remark),
    ]
    return Outcome("\n".join(lines), sample.reasons)


def _corrupt(
    source: ImageSource, record: ImageRecord, out: Path, place: str, seed: int, size: int
) -> int:
    """Write one image's 75 files; the number of those that were not there."""
    cells = [(corruption, severity) for corruption in CORRUPTIONS for severity in SEVERITIES]
    targets = {cell: out / cell[0] / str(cell[1]) / place for cell in cells}
    missing = {cell: path for cell, path in targets.items() if not path.is_file()}
    if not missing:
        return 0
    square = Preprocessing.robustness_sets(size)(source.decode(record)).permute(1, 2, 0).numpy()
    pixels = np.rint(square * 255).astype(np.uint8)
    name = PurePosixPath(record.image_id).name
    for cell, path in missing.items():
        chance = derive_seed("corrupt", seed, str(record.label), name, *cell)
        picture = Image.fromarray(corrupted(pixels, *cell, np.random.default_rng(chance)))
        write_atomically(path, partial(picture.save, format="JPEG", quality=QUALITY, optimize=True))
    return len(missing)


def _places(records: Sequence[ImageRecord]) -> Mapping[ImageRecord, str]:
    """`class/name.JPEG` of each image; where two would share one, both have their whole path.

    A class is the synset whose index is the label, if the image lies in its folder; else the label.
    """
    folders, places = {}, {}
    for record in records:
        parts = PurePosixPath(record.image_id).parts[:-1]
        synset = next((part for part in reversed(parts) if is_synset(part)), "")
        is_label = synset_indices().get(synset) == record.label
        folders[record] = synset if is_label else str(record.label)
        places[record] = f"{folders[record]}/{PurePosixPath(record.image_id).stem}.JPEG"
    often = Counter(places.values())
    return {
        record: place
        if often[place] == 1
        else f"{folders[record]}/{record.image_id.replace('/', '__')}.JPEG"
        for record, place in places.items()
    }


def _lists(
    source: ImageSource,
    sample: Sample,
    places: Mapping[ImageRecord, str],
    seed: int,
    size: int,
) -> dict[str, bytes]:
    """The content of each list that stands in the folder, by its name."""
    rows = [
        (places[record], record.label, record.image_id, sha256) for record, sha256 in sample.chosen
    ]
    about = {
        "made_by": "mjp sample --corrupt",
        "seed": seed,
        "size": size,
        "images": len(rows),
        "differs_from_the_official_files": list(DIFFERENCES),
    }
    folders = {PurePosixPath(record.image_id).parent.name for record in source.records}
    if source.records[0].label_source == "folder" and not all(map(is_class_index, folders)):
        about[PLAIN] = len({record.label for record in source.records})
    texts = {
        MARKER: json.dumps(about, indent=1) + "\n",
        "images.csv": csv_text(("file", "label", "image_id", "sha256"), rows),
        "skipped.csv": sample.tables()["skipped.csv"],
    }
    return {name: text.encode() for name, text in texts.items()}


# the published sets -------------------------------------------------------------------------------

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
    plain_classes  how many classes a model must have, for numbers of plain folders to be its own;
                   None where the numbers mean something without that, and for official files
    """

    by_cell: Mapping[Cell, Path]
    images: ImageSource
    official: bool
    plain_classes: int | None


def corruption_folders(path: Path) -> CorruptionFolders:
    """The cells of ImageNet-C in this folder; UserError if it has another layout."""
    places = {
        name: place
        for family, functions in FAMILIES.items()
        for name in [function.__name__ for function in functions]
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
    marker, about = path / MARKER, None
    if marker.is_file():
        text = DESCRIPTION.bytes(marker).decode("utf-8", "replace")
        about = json_value(text, marker, DESCRIPTION)
    count = about.get(PLAIN) if isinstance(about, dict) else None
    plain = count if isinstance(count, int) else None
    return CorruptionFolders(cells, images, not marker.exists(), plain)


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

    def failed(record: ImageRecord, reason: str) -> None:
        unreadable[str(source.path / record.image_id)] = reason
        rows.append((record.image_id, np.nan, np.nan))

    for batch, images in opened_batches(model, source, records, prepare, failed, bar.advance):
        logits = model(model.normalize(images.to(model.like)))[:, among].cpu()
        sure, best = logits.double().softmax(-1).max(-1)  # in float32 many would be 1 alike
        for record, share, place in zip(batch, sure.tolist(), best.tolist(), strict=True):
            rows.append((record.image_id, float(among[place] == record.label), share))
    return pd.DataFrame(rows, columns=["image_id", "correct", "confidence"])
