"""images.csv of a run folder: a line for each image, with the hashes that identify it.

    image_id,label,label_source,sha256,pixel_sha256,status,reason,check

The file only grows while a run goes on: what is learnt anew of an image is a further line, and the
last one counts. `tidy` leaves one line an image, which is what a run ends with. `check` is the
line's own checksum (`core/checked_lines`); a line with another one is damaged and left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mjp_privacy.core.checked_lines import CSV_LINES
from mjp_privacy.core.read import FileKind, is_there

COLUMNS = ("image_id", "label", "label_source", "sha256", "pixel_sha256", "status", "reason")
HEADER = ",".join((*COLUMNS, "check"))
HEADER_BEFORE = ",".join(COLUMNS)
"""As earlier versions wrote it, without checksums."""

END = "\r\n"  # while a line is made: what is in it is quoted

IMAGES = FileKind("the list of a run's images", "Run the attack again.", 1 << 34)


@dataclass(frozen=True)
class ImageList:
    """What images.csv holds: ImageList.read(Path("results/demo/images.csv"), checked=True)."""

    images: Mapping[str, dict[str, Any]]  # by image_id, in the order of the file
    damaged: int = 0  # number of lines that changed after they were written
    superseded: int = 0  # number of lines that a later one of the same image stands for
    unchecked: int = 0  # whether it is of an earlier version, without checksums

    @classmethod
    def read(cls, path: Path, *, checked: bool) -> ImageList:
        """The list; empty if there is none yet.

        checked: whether lines without a checksum are damaged; earlier versions wrote none
        """
        if not is_there(path):
            return cls({})
        first, _, rest = IMAGES.bytes(path).partition(b"\n")
        header = first.rstrip(b"\r").decode("utf-8", errors="replace")
        if header == HEADER_BEFORE and not checked:
            cells: Iterable[list[str]] = _rows(rest.decode("utf-8", errors="replace"))
            damaged, unchecked = 0, 1
        else:
            lines = CSV_LINES.read(rest, needed=checked)
            cells = (row for text in lines.texts for row in _rows(text) or [[]])
            damaged, unchecked = lines.damaged + (header != HEADER), lines.unchecked
        images: dict[str, dict[str, Any]] = {}
        superseded = 0
        for image in map(_image, cells):
            if image is None:
                damaged += 1
                continue
            superseded += image["image_id"] in images
            images[image["image_id"]] = image
        return cls(images, damaged, superseded, unchecked)

    @property
    def tidy(self) -> bool:
        """Whether the file holds one whole line an image and nothing else."""
        return not (self.damaged or self.superseded or self.unchecked)

    @property
    def table(self) -> pd.DataFrame:
        """The images as a table; label: a number, NaN where there is none."""
        table = pd.DataFrame(list(self.images.values()), columns=list(COLUMNS))
        return table.assign(label=pd.to_numeric(table["label"]))


def append_images(path: Path, images: Iterable[Mapping[str, Any]]) -> None:
    """Add lines; when this returns they are on the disk."""
    if not is_there(path) or not path.stat().st_size:
        write_images(path, images)
    else:
        CSV_LINES.append(path, map(_line, images), lasting=True)


def write_images(path: Path, images: Iterable[Mapping[str, Any]]) -> None:
    """Write the whole list."""
    CSV_LINES.rewrite(path, HEADER + "\n", map(_line, images))


def _line(image: Mapping[str, Any]) -> str:
    """One image as CSV, without a line's end."""
    text = io.StringIO()
    values = [image[name] for name in COLUMNS]
    label = values[1]
    values[1] = "" if label is None or pd.isna(label) else int(label)
    csv.writer(text, lineterminator=END).writerow(values)
    return text.getvalue().removesuffix(END)


def _rows(text: str) -> list[list[str]]:
    """The cells of each line; [] where the text is no CSV."""
    try:
        return list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error:
        return []


def _image(cells: Sequence[str]) -> dict[str, Any] | None:
    """An image's fields; None where the cells are not those of a line."""
    if len(cells) != len(COLUMNS):
        return None
    image: dict[str, Any] = dict(zip(COLUMNS, cells, strict=True))
    if image["status"] not in ("ok", "failed") or not image["image_id"]:
        return None
    try:
        image["label"] = int(float(image["label"])) if image["label"] else None
    except (ValueError, OverflowError):
        return None
    return image
