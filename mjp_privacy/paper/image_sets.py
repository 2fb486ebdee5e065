"""Sets that `mjp sample` makes of no photographs: CIFAR-10's zips, and pictures of shapes.

CIFAR-10's official binary files become two zips of class folders, which every command here takes:

OUT/cifar10-train.zip   airplane/0000.png to truck/4999.png, 50,000 pictures
OUT/cifar10-test.zip    airplane/0000.png to truck/0999.png, 10,000 pictures

Pictures are numbered in the order of the files, class by class. PNG keeps every value.

Pictures of shapes with label maps, to try segmentation, are drawn in ADE20K's layout:

OUT/images/{training,validation}/NAME.jpg         photographs' format, their sizes differ
OUT/annotations/{training,validation}/NAME.png    0: no label (outlines), 1 to 6: the SHAPES
OUT/shapes.json                                   seed and number

A class shows in texture (a checked square, a striped triangle) or in where something is: the same
disc is another class above the horizon than below it.
"""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_name, output_folder, write_atomically
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import MIB, FileKind, is_there
from mjp_privacy.core.text import shown

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
    "https://www.cs.toronto.edu/~kriz/cifar.html, or the folder that it unpacks to."
)
ARCHIVE = FileKind("CIFAR-10's binary version as a .tar.gz", WHERE, LARGEST)
BATCH = FileKind("a file of CIFAR-10's binary version", WHERE, LARGEST)

Picture = tuple[str, NDArray[np.uint8]]  # its name in the zip, and (32, 32, 3)


def make_cifar10(source: Path, out: Path) -> str:
    """Write both zips into a folder; a line on what was done."""
    check_name(out)
    for name in FILES:
        if is_there(out / name):
            raise UserError(
                f"{shown(out / name)} is there already. Expected a folder without it: give another "
                "--out, or remove the file."
            )
    names = [name for files in FILES.values() for name in files]
    contents = (
        {name: BATCH.bytes(source / name) for name in names}
        if source.is_dir()
        else _of_archive(source, names)
    )
    sets = {name: list(_pictures(source, contents, files)) for name, files in FILES.items()}
    output_folder(out)
    for name, pictures in sets.items():
        write_atomically(out / name, partial(_zip, pictures))
    train, test = map(len, sets.values())
    return (
        f"Wrote {train} training pictures into {shown(out / 'cifar10-train.zip')} and {test} test "
        f"pictures into {shown(out / 'cifar10-test.zip')}."
    )


def _of_archive(path: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """The files by name; nothing is unpacked to the disk, and no file is read unbounded."""
    ARCHIVE.check(path)
    contents: dict[str, bytes] = {}
    with ARCHIVE.reading(path), tarfile.open(path, "r:gz") as archive:
        for entry in archive:
            name = entry.name.rpartition("/")[2]
            if entry.offset_data > LARGEST:
                raise ARCHIVE.refusal(path, f"more than {LARGEST // MIB:,} MiB inside")
            if name == "data_batch_1":
                raise ARCHIVE.refusal(path, "the python version, whose pickles could run code")
            file = archive.extractfile(entry) if name in wanted else None
            if file is not None:
                contents[name] = file.read(RECORD * IN_A_FILE + 1)
    missing = [name for name in wanted if name not in contents]
    if missing:
        raise ARCHIVE.refusal(path, f"an archive without {', '.join(missing)}")
    return contents


def _pictures(
    source: Path, contents: Mapping[str, bytes], files: Sequence[str]
) -> Iterator[Picture]:
    """The pictures of these files, each numbered within its class: `airplane/0000.png`."""
    counted = [0] * len(CLASSES)
    for file in files:
        content = contents[file]
        if len(content) != RECORD * IN_A_FILE:
            raise BATCH.refusal(
                source, f"{len(content):,} bytes or more, not {RECORD * IN_A_FILE:,}", file
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
        if records[:, 0].max() >= len(CLASSES):
            raise BATCH.refusal(source, f"a picture of class {records[:, 0].max()}", file)
        for record in records:
            label = int(record[0])
            pixels = np.ascontiguousarray(record[1:].reshape(3, 32, 32).transpose(1, 2, 0))
            yield f"{CLASSES[label]}/{counted[label]:04d}.png", pixels
            counted[label] += 1


def _zip(pictures: Sequence[Picture], path: Path) -> None:
    """The same bytes for the same pictures; PNG is compressed already."""
    bar = Progress("writing", len(pictures), "pictures")
    with bar, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, pixels in pictures:
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "PNG")
            archive.writestr(zipfile.ZipInfo(name), content.getvalue())
            bar.advance()


# shapes -------------------------------------------------------------------------------------------

SHAPES = ("sky", "ground", "disc in the sky", "disc on the ground", "square", "triangle")
SKY, GROUND, HIGH_DISC, LOW_DISC, SQUARE, TRIANGLE = range(1, 7)
MOST = 100_000
WIDTHS, HEIGHTS = (72, 104), (64, 96)
SHAPES_IN_A_PICTURE = (3, 6)
MARKER = "shapes.json"
DESCRIPTION = FileKind("what `mjp sample --shapes` wrote", "Give another --out.", 1 << 20)

Pixels = NDArray[np.float64]
Labels = NDArray[np.uint8]


def make_shapes(out: Path, number: int, seed: int) -> str:
    """Draw `number` training pictures and a quarter as many for validation; says what was done.

    A command that was stopped goes on: files that are there are drawn again, the same.
    """
    if not 1 <= number <= MOST:
        raise UserError(f"--shapes is a number of pictures: expected 1 to {MOST}, got {number}.")
    about = json.dumps({"seed": seed, "training": number, "classes": SHAPES}, indent=2) + "\n"
    marker = out / MARKER
    same = is_there(marker) and DESCRIPTION.text(marker) == about
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not same):
        raise UserError(
            f"--out {shown(out)} is a file, or holds something other than these shapes. Expected a "
            "new or empty folder: give another name."
        )
    output_folder(out)
    write_atomically(marker, lambda path: path.write_text(about, encoding="utf-8"))
    numbers = {"training": number, "validation": max(number // 4, 1)}
    for split, many in numbers.items():
        for place in range(many):
            pixels, labels = drawn(derive_seed("shapes", seed, split, place))
            name = f"{split}/{place:06d}"
            photograph = partial(Image.fromarray(pixels).save, format="JPEG", quality=95)
            write_atomically(out / f"images/{name}.jpg", photograph)
            label_map = partial(Image.fromarray(labels).save, format="PNG")
            write_atomically(out / f"annotations/{name}.png", label_map)
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
