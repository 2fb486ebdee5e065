"""CIFAR-10's official binary files as two zips of class folders, which every command here takes.

OUT/cifar10-train.zip   airplane/0000.png to truck/4999.png, 50,000 pictures
OUT/cifar10-test.zip    airplane/0000.png to truck/0999.png, 10,000 pictures

Pictures are numbered in the order of the files, class by class. PNG keeps every value.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_name, output_folder, write_atomically
from mjp_privacy.core.read import MIB, FileKind, is_there
from mjp_privacy.core.text import shown

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
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
Showing = Callable[[Sequence[Picture]], Iterable[Picture]]


def make_cifar10(source: Path, out: Path, showing: Showing = iter) -> str:
    """Write both zips into a folder; a line on what was done.

    make_cifar10(Path("cifar-10-binary.tar.gz"), Path("data"))  # data/cifar10-train.zip, …

    showing: yields the pictures that it is given, and may show how many are written
    """
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
        write_atomically(out / name, partial(_zip, showing(pictures)))
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
            pixels = np.ascontiguousarray(record[1:].reshape(3, SIDE, SIDE).transpose(1, 2, 0))
            yield f"{CLASSES[label]}/{counted[label]:04d}.png", pixels
            counted[label] += 1


def _zip(pictures: Iterable[Picture], path: Path) -> None:
    """The same bytes for the same pictures; PNG is compressed already."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, pixels in pictures:
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "PNG")
            archive.writestr(zipfile.ZipInfo(name), content.getvalue())
