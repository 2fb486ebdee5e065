"""Label files: a CSV, and the formats in which ImageNet's validation labels are published.

    file,label[,...]                 or image, image_id, filename; a label is an index or a synset
    val.txt                          `name index`, indices 0..999 (Caffe)
    LOC_val_solution.csv             ImageId,PredictionString; the first synset counts (Kaggle)
    *synset_labels.txt               one synset per line, in order of the file names (TensorFlow)
    ILSVRC2012_validation_ground_truth.txt   refused: its ids are in another order (devkit)

The format is recognised by the content, never by the file's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import MOST_LETTERS, FileKind, csv_rows
from mjp_privacy.core.text import shown

FILE_COLUMNS = ("file", "image", "image_id", "filename")
NUM_IMAGENET = 1000
MOST_CLASSES = 1_000_000
"""Class indices stay below it."""

LABEL_FILE = FileKind(
    "a label file", "A CSV with the header `file,label`, saved as UTF-8, always works."
)

_SYNSET = re.compile(r"n[0-9]{8}")
_INDEX = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class LabelTable:
    """The content of a label file: either `rows` (name, label), or `ordered` labels alone."""

    origin: str
    source: Literal["csv", "file"]
    rows: tuple[tuple[str, int], ...] = ()
    ordered: tuple[int, ...] = ()


@cache
def synset_indices() -> dict[str, int]:
    """Class index by synset (n01440764): its place among the sorted 1000 of ILSVRC 2012."""
    from timm.data.imagenet_info import ImageNetInfo

    info: Any = ImageNetInfo()  # its methods are not annotated
    return {synset: index for index, synset in enumerate(info.label_names())}


def is_synset(text: str) -> bool:
    """Whether `text` looks like a synset; it need not be one of the 1000."""
    return _SYNSET.fullmatch(text) is not None


def parse_label_file(origin: str, content: bytes) -> LabelTable:
    """The labels in the bytes of a label file; UserError if its format is none of the above.

    `origin` names the file in messages.
    """
    if len(content) > LABEL_FILE.max_bytes:
        size = f"{len(content) >> 20} MiB, more than {LABEL_FILE.max_bytes >> 20} MiB"
        raise LABEL_FILE.refusal(Path(origin), size)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{shown(origin)} is not UTF-8 text ({error}). Save it as UTF-8."
        ) from error
    lines = text.splitlines()
    _refuse_long_lines(origin, lines)
    first = next((line.strip() for line in lines if line.strip()), "")
    header = [cell.strip().lower() for cell in first.split(",")]
    if "imageid" in header and "predictionstring" in header:
        return _parse_solution(origin, text)
    if "label" in header and any(column in header for column in FILE_COLUMNS):
        return _parse_csv(origin, text)
    if is_synset(first):
        return _parse_synset_list(origin, lines)
    if _INDEX.fullmatch(first):
        raise _ground_truth_refused(origin)
    if _name_and_index(first) is not None:
        return _parse_names_and_indices(origin, lines)
    raise UserError(
        f"{shown(origin)} starts with {shown(repr(first[:80]))}; expected a CSV with the columns "
        "`file` and `label`, lines of `name index`, Kaggle's `ImageId,PredictionString`, or one "
        "synset per line. A CSV with the header `file,label` always works."
    )


def _refuse_long_lines(origin: str, lines: Sequence[str]) -> None:
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_LETTERS:
            raise _wrong(origin, number, "a name and its label", f"{len(line)} characters")


def _wrong(origin: str, number: int, expected: str, got: str) -> UserError:
    """The error for one line of a label file."""
    return UserError(f"{shown(origin)}, line {number}: expected {expected}, got {got}.")


def _rows(origin: str, text: str, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(line number, cells by the column's name in lower case) of a CSV."""
    table = text.lstrip("\r\n")
    above = text[: len(text) - len(table)].count("\n")  # empty lines before the header
    rows = csv_rows(
        table, Path(origin), LABEL_FILE, needed, column=lambda name: name.strip().lower()
    )
    return [
        (above + number, {name: cell.strip() for name, cell in row.items()}) for number, row in rows
    ]


def _parse_csv(origin: str, text: str) -> LabelTable:
    rows = []
    for number, row in _rows(origin, text, ("label",)):
        name = next((row[column] for column in FILE_COLUMNS if row.get(column)), "")
        rows.append((number, name, _label(origin, number, row["label"])))
    return LabelTable(origin, "csv", rows=_consistent(origin, rows))


def _parse_solution(origin: str, text: str) -> LabelTable:
    rows = []
    for number, row in _rows(origin, text, ("imageid", "predictionstring")):
        synset = row["predictionstring"].split(" ")[0]
        rows.append((number, row["imageid"], _synset_index(origin, number, synset)))
    return LabelTable(origin, "file", rows=_consistent(origin, rows))


def _parse_synset_list(origin: str, lines: Sequence[str]) -> LabelTable:
    cells = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    return LabelTable(origin, "file", ordered=tuple(_synset_index(origin, *cell) for cell in cells))


def _parse_names_and_indices(origin: str, lines: Sequence[str]) -> LabelTable:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parts = _name_and_index(line.strip())
        if parts is None:
            raise _wrong(origin, number, "`name index`", shown(repr(line[:80])))
        rows.append((number, parts[0], _index(origin, number, parts[1])))
    largest = max(label for _, _, label in rows)
    if largest >= NUM_IMAGENET:
        raise UserError(
            f"{shown(origin)} holds the class index {largest}; expected 0..999, "
            "places among the sorted synsets, counted from 0. Subtract 1 if the file counts from "
            "1; for other classes give a CSV with the header `file,label`."
        )
    return LabelTable(origin, "file", rows=_consistent(origin, rows))


def _name_and_index(line: str) -> tuple[str, str] | None:
    """`a photo.jpg 17` in its two parts; None where the line has not this form."""
    parts = line.rsplit(None, 1)
    if len(parts) < 2 or not _INDEX.fullmatch(parts[1]):
        return None
    return parts[0], parts[1]


def _label(origin: str, number: int, text: str) -> int:
    if _INDEX.fullmatch(text):
        return _index(origin, number, text)
    if is_synset(text):
        return _synset_index(origin, number, text)
    raise _wrong(
        origin,
        number,
        "a label that is a class index (0, 1, ...) or a synset (n01440764)",
        shown(repr(text), 80),
    )


def _index(origin: str, number: int, digits: str) -> int:
    """A class index of a bearable size; Python itself refuses texts of thousands of digits."""
    if len(digits) > 20 or int(digits) >= MOST_CLASSES:
        got = digits if len(digits) <= 20 else f"one of {len(digits)} digits"
        raise _wrong(origin, number, f"a class index below {MOST_CLASSES}", got)
    return int(digits)


def _synset_index(origin: str, number: int, synset: str) -> int:
    if synset not in synset_indices():
        expected = "one of the 1000 synsets of ILSVRC 2012, such as n01440764"
        raise _wrong(origin, number, expected, shown(repr(synset), 80))
    return synset_indices()[synset]


def _consistent(origin: str, rows: Sequence[tuple[int, str, int]]) -> tuple[tuple[str, int], ...]:
    """Names and labels without repetitions; UserError if a name is empty or has two labels."""
    seen: dict[str, int] = {}
    for number, written, label in rows:
        name = _clean(written)
        if not name:
            raise _wrong(origin, number, "the name of an image", "none")
        if seen.setdefault(name, label) != label:
            raise UserError(
                f"{shown(origin)}, line {number}, gives {shown(name)} twice, with the labels "
                f"{seen[name]} and {label}. Expected one label per image: remove the wrong line."
            )
    return tuple(seen.items())


def _clean(name: str) -> str:
    return name.strip().replace("\\", "/").removeprefix("./")


def _ground_truth_refused(origin: str) -> UserError:
    return UserError(
        f"{shown(origin)} holds bare numbers, like ILSVRC2012_validation_ground_truth.txt of the "
        "devkit. Its ids 1..1000 follow the devkit's meta.mat and not the sorted synsets that "
        "models are trained on, so the labels would be wrong. Give val.txt, LOC_val_solution.csv, "
        "a list of synsets or a CSV with `file,label`, or sort the images into synset folders. "
        "To run without labels, move the file away."
    )
