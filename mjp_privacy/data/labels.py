"""Where the labels of a folder or zip come from, in order of precedence.

1. the label file that the caller names
2. `labels.csv` inside, with the header `file,label`
3. synset folders, or flat files named like n01440764_10026.JPEG: the ImageNet class index
4. other class folders: their number if all their names are numbers, else their place when sorted
5. for flat ILSVRC2012_val_*.JPEG: val.txt, LOC_val_solution.csv or *synset_labels.txt, among the
   images or beside their folder or zip
6. nothing: the images carry no labels

A folder around all images (such as `val/` in a zip of it) does not count as a class folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from mjp_privacy.core.errors import NoFile, UserError
from mjp_privacy.core.read import MOST_LETTERS, FileKind, csv_rows
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import ImageError
from mjp_privacy.data.files import Files, missing_path

# ------------------------------------------------------------------------------------------------
# Label files: a CSV, and the formats in which ImageNet's validation labels are published.
#
#     file,label[,...]                 or image, image_id, filename; a label is an index or a synset
#     val.txt                          `name index`, indices 0..999 (Caffe)
#     LOC_val_solution.csv             ImageId,PredictionString; the first synset counts (Kaggle)
#     *synset_labels.txt               one synset per line, in order of the file names (TensorFlow)
#     ILSVRC2012_validation_ground_truth.txt   refused: its ids are in another order (devkit)
#
# The format is recognised by the content, never by the file's name.

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


# ------------------------------------------------------------------------------------------------
# Assign the labels of a label file to the images that it names.

NUM_VALIDATION = 50_000

_VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.", re.IGNORECASE)
_SHOWN = 5


def match_labels(table: LabelTable, image_ids: Sequence[str], wrapper: str) -> dict[str, int]:
    """The label of every image by its id; UserError if any image has none.

    `wrapper`: a folder around all images ("val/") that the names in the file may leave out.
    """
    if table.ordered:
        return _in_order(table, image_ids)
    keys: tuple[Callable[[str], str], ...] = (
        lambda name: name,
        lambda name: name.removeprefix(wrapper),
        lambda name: _without_suffix(name.removeprefix(wrapper)),
        lambda name: PurePosixPath(name).name,
        lambda name: PurePosixPath(name).stem,
    )
    best: dict[str, int] = {}
    for key in keys:
        labels = _match_by(key, table.rows, image_ids)
        if len(labels) == len(image_ids):
            return labels
        best = max(best, labels, key=len)
    raise _unmatched(table, image_ids, best)


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown(name, 100) for name in names[:_SHOWN]) + more


def validation_number(image_id: str) -> int | None:
    """17 for .../ILSVRC2012_val_00000017.JPEG; None for any other name."""
    match = _VALIDATION_IMAGE.match(PurePosixPath(image_id).name)
    return int(match[1]) if match else None


def _without_suffix(name: str) -> str:
    """a/b for a/b.png; pathlib's own raises for names such as "." and "..png"."""
    path = PurePosixPath(name)
    return str(path).removesuffix(path.suffix)


def _match_by(
    key: Callable[[str], str], rows: Sequence[tuple[str, int]], image_ids: Sequence[str]
) -> dict[str, int]:
    """The labels of the images whose key has exactly one; none if two images share a key."""
    if len({key(image_id) for image_id in image_ids}) < len(image_ids):
        return {}
    by_key: dict[str, set[int]] = {}
    for name, label in rows:
        by_key.setdefault(key(name), set()).add(label)
    by_image = {image_id: by_key.get(key(image_id), set()) for image_id in image_ids}
    return {
        image_id: next(iter(labels)) for image_id, labels in by_image.items() if len(labels) == 1
    }


def _in_order(table: LabelTable, image_ids: Sequence[str]) -> dict[str, int]:
    """The k-th label for the k-th file name; with ImageNet's 50 000 labels, for image number k."""
    numbers = {image_id: validation_number(image_id) for image_id in image_ids}
    if len(table.ordered) == NUM_VALIDATION and all(numbers.values()):
        return {
            image_id: table.ordered[number - 1]
            for image_id, number in numbers.items()
            if number is not None
        }
    if len(table.ordered) != len(image_ids):
        raise UserError(
            f"{shown(table.origin)} holds {len(table.ordered)} labels without names for "
            f"{len(image_ids)} images; expected one for each, in the order of the file names. "
            "Give a CSV with the header `file,label` instead."
        )
    by_name = sorted(image_ids, key=lambda image_id: (PurePosixPath(image_id).name, image_id))
    return dict(zip(by_name, table.ordered, strict=True))


def _unmatched(table: LabelTable, image_ids: Sequence[str], labels: Mapping[str, int]) -> UserError:
    missing = [image_id for image_id in image_ids if image_id not in labels]
    named = [name for name, _ in table.rows]
    if not labels:
        return UserError(
            f"{shown(table.origin)} names none of the {len(image_ids)} images: its {len(named)} "
            f"names are {some(named)}; the images are {some(missing)}. Expected paths relative to "
            "the folder or zip."
        )
    return UserError(
        f"{shown(table.origin)} leaves {len(missing)} of {len(image_ids)} images without a label: "
        f"{some(missing)}. Expected a line for each: add the lines, or take the images out."
    )


LabelSource = Literal["csv", "synset", "folder", "file", "none"]

_FLAT_LABEL_FILES = (
    "val.txt",
    "LOC_val_solution.csv",
    "*synset_labels.txt",
    "ILSVRC2012_validation_ground_truth.txt",
)
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})


@dataclass(frozen=True)
class Labels:
    """Labels by image id, for all images or for none; `described` says where they come from."""

    by_image: Mapping[str, int]
    source: LabelSource
    described: str


def find_labels(files: Files, image_ids: Sequence[str], label_file: Path | None) -> Labels:
    """The labels of every image, or of none. UserError if a source has labels for only some."""
    wrapper = _wrapper(image_ids)
    if label_file is not None:
        return _from_table(_read_outside(label_file), image_ids, wrapper)
    parents = PurePosixPath(wrapper).parts
    for depth in range(len(parents), -1, -1):
        base = "".join(parent + "/" for parent in parents[:depth])
        if base + "labels.csv" in files.names:
            return _from_table(_read_inside(files, base + "labels.csv"), image_ids, base)
    inner = {image_id: image_id.removeprefix(wrapper) for image_id in image_ids}
    _refuse_splits(files, inner)
    return (
        _from_synsets(files, inner)
        or _from_class_folders(inner)
        or _from_validation_file(files, image_ids, wrapper)
        or Labels({}, "none", "The images carry no labels.")
    )


def _wrapper(image_ids: Sequence[str]) -> str:
    """The folders that all images lie in: "", "val/", "imagenet/val/"; never a synset folder."""
    wrapper: list[str] = []
    for parts in zip(*(PurePosixPath(name).parts[:-1] for name in image_ids), strict=False):
        if len(set(parts)) > 1 or is_synset(parts[0]):
            break
        wrapper.append(parts[0] + "/")
    return "".join(wrapper)


# from files ---------------------------------------------------------------------------------


def _read_outside(path: Path) -> LabelTable:
    try:
        return parse_label_file(shown(path), LABEL_FILE.bytes(path))
    except NoFile as error:
        raise missing_path("label file", path) from error


def _read_inside(files: Files, name: str) -> LabelTable:
    origin = f"{files.path.name}/{name}"
    try:
        return parse_label_file(origin, files.read(name))
    except ImageError as error:
        raise UserError(
            f"Expected a label file, but {shown(origin)} {error.reason}. Replace it, or take "
            "it out."
        ) from error


def _from_table(table: LabelTable, image_ids: Sequence[str], wrapper: str) -> Labels:
    by_image = match_labels(table, image_ids, wrapper)
    count = len(set(by_image.values()))
    named = "/".join(Path(table.origin).parts[-2:])  # no full paths of this machine in reports
    described = f"Labels come from {named} ({len(by_image)} images, {count} classes)."
    return Labels(by_image, table.source, described)


def _from_validation_file(files: Files, image_ids: Sequence[str], wrapper: str) -> Labels | None:
    """For flat ILSVRC2012_val_* images: from a file among them, or beside their folder or zip."""
    if not all(validation_number(image_id) for image_id in image_ids):
        return None
    for pattern in _FLAT_LABEL_FILES:
        for name in files.names:
            if fnmatch(name.removeprefix(wrapper), pattern):
                return _from_table(_read_inside(files, name), image_ids, wrapper)
        for path in sorted(files.path.absolute().parent.glob(pattern)):
            return _from_table(_read_outside(path), image_ids, wrapper)
    return None


# from folders -------------------------------------------------------------------------------


def _refuse_splits(files: Files, inner: Mapping[str, str]) -> None:
    """UserError where the folders are splits such as `train` and `val`: these are no classes."""
    tops = sorted({PurePosixPath(path).parts[0] for path in inner.values() if "/" in path})
    if len(tops) > 1 and all(top.lower() in _SPLITS for top in tops):
        raise UserError(
            f"{shown(files.path)} holds several splits: {some(tops)}. Expected the images of one: "
            f"give that folder (such as {shown(files.path / tops[-1])}), or a zip of it."
        )


def _from_synsets(files: Files, inner: Mapping[str, str]) -> Labels | None:
    """ImageNet class indices of synset folders, or of synsets in the file names; None without any.

    `inner` is each image's path inside the wrapper.
    """
    synsets = {image_id: _synset_folder(path) for image_id, path in inner.items()}
    if not any(synsets.values()):
        return _from_synset_names(inner)
    strays = [image_id for image_id, synset in synsets.items() if synset is None]
    if strays:
        raise UserError(
            f"{shown(files.path)} holds synset folders, but {len(strays)} of {len(inner)} images "
            f"lie outside them: {some(strays)}. Move these away, or give a CSV with `file,label`."
        )
    return _synset_labels(files, {image_id: synset or "" for image_id, synset in synsets.items()})


def _synset_labels(files: Files, synsets: Mapping[str, str]) -> Labels:
    indices = synset_indices()
    unknown = sorted({synset for synset in synsets.values() if synset not in indices})
    if unknown:
        raise UserError(
            f"{shown(files.path)} holds {len(unknown)} folders named like synsets that are none of "
            f"the 1000 of ILSVRC 2012: {some(unknown)}. Take them out. A CSV `file,label` for "
            "--labels names the classes of --data, --images and --from, of no other option."
        )
    by_image = {image_id: indices[synset] for image_id, synset in synsets.items()}
    count = len(set(synsets.values()))
    described = f"Labels are the ImageNet class indices (0..999) of {count} synset folders."
    return Labels(by_image, "synset", described)


def _synset_folder(path: str) -> str | None:
    """The innermost folder named like a synset."""
    return next((part for part in PurePosixPath(path).parts[-2::-1] if is_synset(part)), None)


def _from_synset_names(inner: Mapping[str, str]) -> Labels | None:
    """For flat images whose names all start with a synset, as ImageNet's training images do."""
    if any("/" in path or not re.match(r"n\d{8}_", path) for path in inner.values()):
        return None
    synsets = {image_id: path.split("_")[0] for image_id, path in inner.items()}
    if not all(synset in synset_indices() for synset in synsets.values()):
        return None
    by_image = {image_id: synset_indices()[synset] for image_id, synset in synsets.items()}
    described = "Labels are the ImageNet class indices (0..999) of the synsets in the file names."
    return Labels(by_image, "synset", described)


def _from_class_folders(inner: Mapping[str, str]) -> Labels | None:
    """From class folders of any other name; None where images also lie beside the folders."""
    if not all("/" in path for path in inner.values()):
        return None
    folders = sorted({path.split("/")[0] for path in inner.values()})
    if all(map(is_class_index, folders)):
        index = {folder: int(folder) for folder in folders}
        how = f"Labels are the numbers that name the {len(folders)} class folders"
    else:
        index = {folder: place for place, folder in enumerate(folders)}
        how = f"Labels are the places of the {len(folders)} class folders in sorted order"
    named = some([f"{folder} = {index[folder]}" for folder in sorted(index, key=index.__getitem__)])
    by_image = {image_id: index[path.split("/")[0]] for image_id, path in inner.items()}
    return Labels(by_image, "folder", f"{how} ({named}).")


def is_class_index(folder: str) -> bool:
    """Whether a folder's name is a class index: `17`, but not `017` and not `20240131`."""
    if not re.fullmatch(r"0|[1-9][0-9]{0,9}", folder):
        return False
    return int(folder) < MOST_CLASSES
