"""Label files: a CSV, and the formats in which ImageNet's validation labels are published.

    file,label[,...]                 or image, image_id, filename; a label is an index or a synset
    val.txt                          `name index`, indices 0..999 (Caffe)
    LOC_val_solution.csv             ImageId,PredictionString; the first synset counts (Kaggle)
    *synset_labels.txt               one synset per line, in order of the file names (TensorFlow)
    ILSVRC2012_validation_ground_truth.txt   refused: its ids are in another order (devkit)

The format is recognised by the content, never by the file's name.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from mjp_privacy.core.errors import UserError

FILE_COLUMNS = ("file", "image", "image_id", "filename")
NUM_IMAGENET = 1000

_SYNSET = re.compile(r"n\d{8}")
_NAME_AND_INDEX = re.compile(r"(\S.*?)\s+(\d+)")


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
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{origin} is not UTF-8 text ({error}). Save it as UTF-8.") from error
    first = next((line.strip() for line in lines if line.strip()), "")
    header = [cell.strip().lower() for cell in first.split(",")]
    if "imageid" in header and "predictionstring" in header:
        return _parse_solution(origin, lines)
    if "label" in header and any(column in header for column in FILE_COLUMNS):
        return _parse_csv(origin, lines)
    if is_synset(first):
        return _parse_synset_list(origin, lines)
    if re.fullmatch(r"\d+", first):
        raise _ground_truth_refused(origin)
    if _NAME_AND_INDEX.fullmatch(first):
        return _parse_names_and_indices(origin, lines)
    raise UserError(
        f"{origin} starts with {first[:80]!r}; expected a CSV with the columns `file` and `label`, "
        "lines of `name index`, Kaggle's `ImageId,PredictionString`, or one synset per line. "
        "A CSV with the header `file,label` always works."
    )


def _parse_csv(origin: str, lines: Sequence[str]) -> LabelTable:
    rows = []
    for number, row in _dict_rows(lines):
        name = next((row[column] for column in FILE_COLUMNS if row.get(column)), "")
        if not name:
            raise UserError(f"{origin}, line {number}: expected the name of an image, got none.")
        rows.append((_clean(name), _label(origin, number, row.get("label", ""))))
    return LabelTable(origin, "csv", rows=_consistent(origin, rows))


def _parse_solution(origin: str, lines: Sequence[str]) -> LabelTable:
    rows = []
    for number, row in _dict_rows(lines):
        synset = row.get("predictionstring", "").split(" ")[0]
        rows.append((_clean(row.get("imageid", "")), _synset_index(origin, number, synset)))
    return LabelTable(origin, "file", rows=_consistent(origin, rows))


def _parse_synset_list(origin: str, lines: Sequence[str]) -> LabelTable:
    cells = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    return LabelTable(origin, "file", ordered=tuple(_synset_index(origin, *cell) for cell in cells))


def _parse_names_and_indices(origin: str, lines: Sequence[str]) -> LabelTable:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _NAME_AND_INDEX.fullmatch(line.strip())
        if match is None:
            raise UserError(f"{origin}, line {number}: expected `name index`, got {line[:80]!r}.")
        rows.append((_clean(match[1]), int(match[2])))
    if max(label for _, label in rows) >= NUM_IMAGENET:
        raise UserError(
            f"{origin} holds the class index {max(label for _, label in rows)}; expected 0..999, "
            "places among the sorted synsets, counted from 0. Subtract 1 if the file counts from "
            "1; for other classes give a CSV with the header `file,label`."
        )
    return LabelTable(origin, "file", rows=_consistent(origin, rows))


def _dict_rows(lines: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(line number, row with lower-case column names), without blank lines."""
    reader = csv.DictReader(io.StringIO("\n".join(line for line in lines)))
    return [
        (
            reader.line_num,
            {
                (name or "").strip().lower(): (cell or "").strip()
                for name, cell in row.items()
                if not isinstance(cell, list)  # cells beyond the header
            },
        )
        for row in reader
    ]


def _label(origin: str, number: int, text: str) -> int:
    if re.fullmatch(r"\d+", text):
        return int(text)
    if is_synset(text):
        return _synset_index(origin, number, text)
    raise UserError(
        f"{origin}, line {number}: expected a label that is a class index (0, 1, ...) or a synset "
        f"(n01440764), got {text!r}."
    )


def _synset_index(origin: str, number: int, synset: str) -> int:
    if synset not in synset_indices():
        raise UserError(
            f"{origin}, line {number}: expected one of the 1000 synsets of ILSVRC 2012, such as "
            f"n01440764, got {synset!r}."
        )
    return synset_indices()[synset]


def _consistent(origin: str, rows: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The rows without repetitions; UserError if a name has two different labels."""
    seen: dict[str, int] = {}
    for name, label in rows:
        if seen.setdefault(name, label) != label:
            raise UserError(
                f"{origin} gives {name} twice, with the labels {seen[name]} and {label}. "
                "Expected one label per image: remove the wrong line."
            )
    return tuple(seen.items())


def _clean(name: str) -> str:
    return name.strip().replace("\\", "/").removeprefix("./")


def _ground_truth_refused(origin: str) -> UserError:
    return UserError(
        f"{origin} holds bare numbers, like ILSVRC2012_validation_ground_truth.txt of the devkit. "
        "Its ids 1..1000 follow the devkit's meta.mat and not the sorted synsets that models are "
        "trained on, so the labels would be wrong. Give val.txt, LOC_val_solution.csv, a list of "
        "synsets or a CSV with `file,label`, or sort the images into synset folders. To run "
        "without labels, move the file away."
    )
