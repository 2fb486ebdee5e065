"""A folder in the layout of ImageNet-C, made from a sample of anybody's images.

OUT/<corruption>/<severity>/<class>/<name>.JPEG
OUT/corrupted.json    seed, size, what differs from the official files, and how many classes there
                      were where plain folders were numbered in sorted order
OUT/images.csv        file,label,image_id,sha256 of each image that was corrupted
OUT/skipped.csv       file,label,reason: candidates that could not be read

A class is called by its synset where the images show it, else by its number.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.read import FileKind, json_value
from mjp_privacy.core.text import shown
from mjp_privacy.data.images import ImageRecord, ImageSource, Preprocessing
from mjp_privacy.data.labels import is_class_index, is_synset, synset_indices
from mjp_privacy.data.sample import Sample, choose, csv_text, refuse_out, remarks
from mjp_privacy.paper.corruptions import CORRUPTIONS, MARKER, SEVERITIES, corrupted

# ------------------------------------------------------------------------------------------------
# What the corruptions of this package do not share with the official files of ImageNet-C.

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
SIZE = 224
SMALLEST, LARGEST = 32, 1024
QUALITY = 85
"""Of the JPEG files, as the official ones have it."""
DESCRIPTION = FileKind("a list that `mjp sample --corrupt` wrote", "Give another --out.", 1 << 30)


def make_corrupted(
    source: ImageSource,
    out: Path,
    *,
    per_class: int = 1,
    limit: int | None = None,
    seed: int = 0,
    size: int = SIZE,
    choosing: Callable[[Sequence[int]], Iterable[int]] = iter,
    corrupting: Callable[[Sequence[ImageRecord]], Iterable[ImageRecord]] = iter,
) -> Outcome:
    """Write every chosen image under every corruption and severity; lines on what was done.

    Files that are there already are left: the same command goes on where it was stopped.
    """
    if not SMALLEST <= size <= LARGEST:
        raise UserError(
            f"--size is a side in pixels: expected {SMALLEST} to {LARGEST}, got {size}."
        )
    refuse_out(source.path, out)
    sample = choose(source, per_class=per_class, limit=limit, seed=seed, progress=choosing)
    places = _places([record for record, _ in sample.chosen])
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
        write_atomically(out / name, partial(_write, content))
    new = sum(
        _corrupt(source, record, out, places[record], seed, size)
        for record in corrupting([record for record, _ in sample.chosen])
    )
    count = len(sample.chosen)
    lines = [
        f"{shown(out)} holds {count} images under {len(CORRUPTIONS)} corruptions at "
        f"{len(SEVERITIES)} severities; {new} files are new.",
        f"These are not the official files of ImageNet-C; {MARKER} says what differs.",
        *remarks(sample, per_class, source.altered.remark),
    ]
    return Outcome("\n".join(lines), sample.reasons)


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


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


def classes_of(path: Path) -> int | None:
    """How many classes the images of `mjp sample --corrupt` had, where their numbers mean nothing
    without that; None where they do, or for other folders."""
    marker = path / MARKER
    if not marker.is_file():
        return None
    about = json_value(DESCRIPTION.bytes(marker).decode("utf-8", "replace"), marker, DESCRIPTION)
    count = about.get(PLAIN) if isinstance(about, dict) else None
    return count if isinstance(count, int) else None


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
