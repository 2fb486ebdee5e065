"""Sets that `mjp sample` makes: CIFAR-10's zips, pictures of shapes, corrupted photographs.

CIFAR-10's official binary files become two zips of class folders, numbered in the files' order:

OUT/cifar10-train.zip   airplane/0000.png to truck/4999.png, 50,000 pictures
OUT/cifar10-test.zip    airplane/0000.png to truck/0999.png, 10,000 pictures

Pictures of shapes with label maps, to try segmentation, are drawn in ADE20K's layout:

OUT/images/{training,validation}/NAME.jpg         photographs' format, their sizes differ
OUT/annotations/{training,validation}/NAME.png    0: no label (outlines), 1 to 6: the SHAPES
OUT/shapes.json                                   seed and number

Corrupted photographs of a sample of anybody's images are written in ImageNet-C's layout:

OUT/<corruption>/<severity>/<class>/<name>.JPEG   the class by its synset or folder where the images
                                                  lie in one, else by its index
OUT/corrupted.json    seed, size, and what differs from the official files
OUT/images.csv        file,label,image_id,sha256 of each image that was corrupted
OUT/skipped.csv       file,label,reason: candidates that could not be read
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_name, output_folder, write_atomically
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import MIB, FileKind, is_there
from mjp_privacy.core.text import shown
from mjp_privacy.data import ImageRecord, ImageSource, Preprocessing
from mjp_privacy.data.labels import is_synset, synset_indices
from mjp_privacy.data.sample import (
    choose,
    csv_text,
    file_in,
    refuse_out,
    remarks,
    whole_folder,
)
from mjp_privacy.paper.corruptions import CORRUPTIONS, SEVERITIES, corrupted
from mjp_privacy.training.batches import class_folders

# CIFAR-10 -----------------------------------------------------------------------------------------

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
RECORD = 1 + 3 * 32 * 32
"""Bytes of a picture: its class, then red, green and blue, row by row."""
IN_A_FILE = 10_000
FILES: Mapping[str, tuple[str, ...]] = {
    "cifar10-train.zip": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "cifar10-test.zip": ("test_batch.bin",),
}
"""What each zip is made of."""
LARGEST = 1 << 30

WHERE = (
    "Give cifar-10-binary.tar.gz, the “binary version” of "
    "https://www.cs.toronto.edu/~kriz/cifar.html."
)
Records = NDArray[np.uint8]
ARCHIVE = FileKind("CIFAR-10's binary version as a .tar.gz", WHERE, LARGEST)


def make_cifar10(source: Path, out: Path) -> str:
    """Write both zips into a folder; a line on what was done."""
    check_name(out)
    for name in FILES:
        if is_there(out / name):
            raise UserError(
                f"{shown(out / name)} is there already. Expected a folder without it: give another "
                "--out, or remove the file."
            )
    contents = _of_archive(source, [name for files in FILES.values() for name in files])
    output_folder(out)
    for name, files in FILES.items():
        records = np.concatenate([contents[file] for file in files])
        write_atomically(out / name, partial(_zip, records))
    return f"Wrote {' and '.join(shown(out / name) for name in FILES)}."


def _of_archive(path: Path, wanted: Sequence[str]) -> dict[str, Records]:
    """The files by name; nothing is unpacked to the disk, and no file is read unbounded."""
    ARCHIVE.check(path)
    contents: dict[str, Records] = {}
    size = RECORD * IN_A_FILE
    with ARCHIVE.reading(path), tarfile.open(path, "r:gz") as archive:
        for entry in archive:
            name = entry.name.rpartition("/")[2]
            if entry.offset_data > LARGEST:
                raise ARCHIVE.refusal(path, f"more than {LARGEST // MIB:,} MiB inside")
            if name == "data_batch_1":
                raise ARCHIVE.refusal(path, "the python version, whose pickles could run code")
            file = archive.extractfile(entry) if name in wanted else None
            if file is None:
                continue
            content = file.read(size + 1)
            if len(content) != size:
                raise ARCHIVE.refusal(path, f"{len(content):,} bytes or more, not {size:,}", name)
            contents[name] = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
            if (largest := contents[name][:, 0].max()) >= len(CLASSES):
                raise ARCHIVE.refusal(path, f"a picture of class {largest}", name)
    missing = [name for name in wanted if name not in contents]
    if missing:
        raise ARCHIVE.refusal(path, f"an archive without {', '.join(missing)}")
    return contents


def _zip(records: Records, path: Path) -> None:
    """The pictures, each numbered within its class: `airplane/0000.png`. The same bytes for the
    same pictures; PNG is compressed already."""
    numbers = [itertools.count() for _ in CLASSES]
    bar = Progress("writing", len(records), "pictures")
    with bar, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for record in records:
            label, planes = int(record[0]), record[1:].reshape(3, 32, 32)
            pixels = np.ascontiguousarray(planes.transpose(1, 2, 0))
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "PNG")
            name = f"{CLASSES[label]}/{next(numbers[label]):04d}.png"
            archive.writestr(zipfile.ZipInfo(name), content.getvalue())
            bar.advance()


# shapes -------------------------------------------------------------------------------------------

# A class shows in texture or in where something is: the same disc is another one above the horizon.
SHAPES = ("sky", "ground", "disc in the sky", "disc on the ground", "square", "triangle")
SKY, GROUND, HIGH_DISC, LOW_DISC, SQUARE, TRIANGLE = range(1, 7)
WIDTHS, HEIGHTS = (72, 104), (64, 96)
SHAPES_IN_A_PICTURE = (3, 6)

Pixels = NDArray[np.float64]
Labels = NDArray[np.uint8]


def make_shapes(out: Path, number: int, seed: int) -> str:
    """Draw `number` training pictures and a quarter as many for validation; says what was done."""
    about = json.dumps({"seed": seed, "training": number, "classes": SHAPES}, indent=2) + "\n"
    numbers = {"training": number, "validation": max(number // 4, 1)}
    with whole_folder(out) as folder:
        (folder / "shapes.json").write_text(about, encoding="utf-8")
        for split, many in numbers.items():
            for place in range(many):
                pixels, labels = drawn(derive_seed("shapes", seed, split, place))
                name = f"{split}/{place:06d}"
                photograph = file_in(folder, f"images/{name}.jpg")
                Image.fromarray(pixels).save(photograph, "JPEG", quality=95)
                Image.fromarray(labels).save(file_in(folder, f"annotations/{name}.png"), "PNG")
    return (
        f"Drew {number} training and {numbers['validation']} validation pictures with label maps "
        f"into {shown(out)}: synthetic shapes in ADE20K's layout, {len(SHAPES)} classes."
    )


def drawn(seed: int) -> tuple[NDArray[np.uint8], Labels]:
    """A picture (H, W, 3) and its label map (H, W)."""
    chance = np.random.default_rng(seed)
    width, height = chance.integers(*WIDTHS), chance.integers(*HEIGHTS)
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    horizon = height * chance.uniform(0.4, 0.6)
    above = rows < horizon
    labels: Labels = np.where(above, SKY, GROUND).astype(np.uint8)
    sky = _colour(chance) * (0.7 + 0.3 * rows / height)[..., None]
    ground = _striped(_colour(chance), _colour(chance), rows)
    pixels: Pixels = np.where(above[..., None], sky, ground)
    for _ in range(chance.integers(*SHAPES_IN_A_PICTURE)):
        _add_shape(pixels, labels, rows, columns, horizon, chance)
    pixels += chance.normal(0, 8, pixels.shape)
    return pixels.clip(0, 255).astype(np.uint8), labels


def _add_shape(
    pixels: Pixels,
    labels: Labels,
    rows: Pixels,
    columns: Pixels,
    horizon: float,
    chance: np.random.Generator,
) -> None:
    """Draw a shape over the picture; its outline has no label."""
    height, width = labels.shape
    radius = chance.uniform(7, 14)
    x, y = chance.uniform(radius, width - radius), chance.uniform(radius, height - radius)
    across, down = columns - x, rows - y
    one, other = _colour(chance), _colour(chance)
    kind = chance.integers(3)
    if kind == 0:  # how far outside the shape a pixel is, in pixels: below 0 inside
        outside = np.hypot(across, down) - radius
        label = HIGH_DISC if y < horizon else LOW_DISC
        texture = np.broadcast_to(one, pixels.shape)
    elif kind == 1:
        outside = np.maximum(abs(across), abs(down)) - radius
        label, texture = SQUARE, _striped(one, other, rows + 3 * (columns // 3 % 2))
    else:
        outside = np.maximum(down - radius, abs(across) * 0.9 - (down + radius) / 2)
        label, texture = TRIANGLE, _striped(one, other, columns)
    inside, outline = outside < -1, abs(outside) <= 1
    pixels[inside], pixels[outline] = texture[inside], 0
    labels[inside], labels[outline] = label, 0


def _colour(chance: np.random.Generator) -> Pixels:
    return chance.uniform(60, 230, 3)


def _striped(one: Pixels, other: Pixels, along: Pixels) -> Pixels:
    """Stripes of two colours, each three pixels wide."""
    return np.where((along // 3 % 2 == 0)[..., None], one, other)


# corrupted photographs ----------------------------------------------------------------------------

CORRUPTED = "corrupted.json"
"""A file that `mjp sample --corrupt` leaves in its folder; official files have none."""

DIFFERENCES = [
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
]

QUALITY = 85
"""Of the JPEG files, as the official ones have it."""


def make_corrupted(
    source: ImageSource,
    out: Path,
    *,
    per_class: int,
    limit: int | None,
    seed: int,
    size: int,
) -> Outcome:
    """Write every image of a sample under every corruption and severity; lines on what was
    done."""
    refuse_out(source.path, out)
    sample = choose(source, per_class=per_class, limit=limit, seed=seed)
    records = [record for record, _ in sample.chosen]
    places = _places(records, class_folders(source.records))
    bar = Progress("corrupting", len(records), "images")
    listed = [(places[record], record.label, record.image_id, sha) for record, sha in sample.chosen]
    about = {
        "made_by": "mjp sample --corrupt",
        "seed": seed,
        "size": size,
        "images": len(listed),
        "differs_from_the_official_files": DIFFERENCES,
    }
    texts = {
        CORRUPTED: json.dumps(about, indent=1) + "\n",
        "images.csv": csv_text(("file", "label", "image_id", "sha256"), listed),
        "skipped.csv": sample.tables()["skipped.csv"],
    }
    with whole_folder(out) as folder, bar:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", newline="")
        for record in records:
            square = Preprocessing.robustness_sets(size)(source.decode(record)).permute(1, 2, 0)
            pixels = np.rint(square.numpy() * 255).astype(np.uint8)
            name = PurePosixPath(record.image_id).name
            for corruption, level in itertools.product(CORRUPTIONS, SEVERITIES):
                chance = derive_seed("corrupt", seed, str(record.label), name, corruption, level)
                changed = corrupted(pixels, corruption, level, np.random.default_rng(chance))
                file = file_in(folder, f"{corruption}/{level}/{places[record]}")
                Image.fromarray(changed).save(file, "JPEG", quality=QUALITY, optimize=True)
            bar.advance()
    lines = [
        f"{shown(out)} holds {len(records)} images under {len(CORRUPTIONS)} corruptions at "
        f"{len(SEVERITIES)} severities.",
        f"These are not the official files of ImageNet-C; {CORRUPTED} says what differs.",
        *remarks(sample, per_class),
    ]
    return Outcome("\n".join(lines), sample.reasons)


def _places(
    records: Sequence[ImageRecord], plain: Mapping[int | None, str]
) -> dict[ImageRecord, str]:
    """`class/name.JPEG` of each image; where another one has that name, its whole path is in it.

    A class is the synset whose index is the label, if the image lies in its folder; else its folder
    among `plain` ones, which are numbered in sorted order, as whoever reads them does; else the
    label.
    """
    places: dict[ImageRecord, str] = {}
    taken: set[str] = set()
    for record in records:
        path = PurePosixPath(record.image_id)
        synset = next((part for part in reversed(path.parts[:-1]) if is_synset(part)), "")
        is_label = synset_indices().get(synset) == record.label
        folder = synset if is_label else plain.get(record.label, str(record.label))
        place = f"{folder}/{path.stem}.JPEG"
        if place in taken:
            place = f"{folder}/{record.image_id.replace('/', '__')}.JPEG"
        places[record] = place
        taken.add(place)
    return places
