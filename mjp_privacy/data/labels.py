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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, csv_rows
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import ImageError
from mjp_privacy.data.files import Files

# ------------------------------------------------------------------------------------------------
# Label files: a CSV, and the formats in which ImageNet's validation labels are published.
#
#     file,label[,...]                 or image, image_id, filename; a label is an index or a synset
#     LOC_val_solution.csv             ImageId,PredictionString; the first synset counts (Kaggle)
#     *synset_labels.txt               one synset per line, in order of the file names (TensorFlow)
#     val.txt                          `name index`, indices 0..999 (Caffe)
#
# The format is recognised by the content, never by the file's name. The bare numbers of the
# devkit's ground truth are none of them: they number classes in another order.

FILE_COLUMNS = ("file", "image", "image_id", "filename")
NUM_IMAGENET = 1000
MOST_CLASSES = 1_000_000
"""Class indices stay below it."""
LABEL_FILE = FileKind(
    "a label file", "A CSV with the header `file,label`, saved as UTF-8, always works."
)
_SYNSET = re.compile(r"n[0-9]{8}")
_NAME_INDEX = re.compile(r"(.*\S)\s+([0-9]+)")

LabelSource = Literal["csv", "synset", "folder", "file", "none"]


class Line(NamedTuple):
    """One label as a file states it; no name where its place among the lines says whose it is."""

    number: int
    name: str | None
    label: str


@dataclass(frozen=True)
class LabelTable:
    """The content of a label file: labels by name, or in the order of the file names."""

    origin: str
    source: LabelSource
    named: Mapping[str, int]
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
    """The labels in the bytes of a label file. UserError if its format is none of the above, if a
    name is empty or has two labels, or if a label is neither a class index nor one of the 1000
    synsets."""
    if len(content) > LABEL_FILE.max_bytes:
        size = f"{len(content) >> 20} MiB, more than {LABEL_FILE.max_bytes >> 20} MiB"
        raise LABEL_FILE.refusal(Path(origin), size)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LABEL_FILE.refusal(Path(origin), f"no UTF-8 text ({error})") from error
    source, most, lines = _recognised(origin, text)
    named: dict[str, int] = {}
    ordered = []
    for number, written, word in lines:
        if is_synset(word) and word in synset_indices():
            label = synset_indices()[word]
        elif re.fullmatch("[0-9]{1,20}", word) and int(word) < most:
            label = int(word)
        else:
            expected = f"a class index from 0 to {most - 1}, or one of ILSVRC 2012's 1000 synsets"
            raise _wrong(origin, number, expected, shown(repr(word), 80))
        if written is None:
            ordered.append(label)
            continue
        name = written.strip().replace("\\", "/").removeprefix("./")
        if not name:
            raise _wrong(origin, number, "the name of an image", "none")
        if named.setdefault(name, label) != label:
            expected = f"one label of {shown(name)}"
            raise _wrong(origin, number, expected, f"two, {named[name]} and {label}")
    return LabelTable(origin, source, named, tuple(ordered))


def _recognised(origin: str, text: str) -> tuple[LabelSource, int, Iterator[Line]]:
    """The source of the labels in a text, the number of classes, and its lines."""
    stripped = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    filled = [entry for entry in stripped if entry[1]]
    first = filled[0][1] if filled else ""
    header = {cell.strip().lower() for cell in first.split(",")}
    if "label" in header and not header.isdisjoint(FILE_COLUMNS):
        return "csv", MOST_CLASSES, _cells(origin, text)
    if {"imageid", "predictionstring"} <= header:
        return "file", MOST_CLASSES, _cells(origin, text)
    if is_synset(first):
        return "file", MOST_CLASSES, (Line(number, None, line) for number, line in filled)
    if _NAME_INDEX.fullmatch(first):
        return "file", NUM_IMAGENET, _names_and_indices(origin, filled)
    raise UserError(
        f"{shown(origin)} starts with {shown(repr(first[:80]))}; expected a CSV with the "
        "header `file,label`, which always works, lines of `name index` as in val.txt, Kaggle's "
        "`ImageId,PredictionString`, or one synset per line. Bare numbers, as the devkit's, are "
        "none of these: they number classes in another order."
    )


def _names_and_indices(origin: str, filled: Sequence[tuple[int, str]]) -> Iterator[Line]:
    for number, line in filled:
        match = _NAME_INDEX.fullmatch(line)
        if match is None:
            raise _wrong(origin, number, "`name index`", shown(repr(line[:80])))
        yield Line(number, match[1], match[2])


def _cells(origin: str, text: str) -> Iterator[Line]:
    """The names and labels of a CSV: ours, with the first column of a name that is filled, or
    Kaggle's."""
    table = text.lstrip("\r\n")
    above = text[: len(text) - len(table)].count("\n")  # empty lines before the header
    rows = csv_rows(table, Path(origin), LABEL_FILE, (), column=lambda name: name.strip().lower())
    for number, row in rows:
        name = next((row[column] for column in (*FILE_COLUMNS, "imageid") if row.get(column)), "")
        label = row.get("label", row.get("predictionstring", "").strip().split(" ")[0])
        yield Line(above + number, name, label.strip())


def _wrong(origin: str, number: int, expected: str, got: str) -> UserError:
    """The error for one line of a label file."""
    return UserError(f"{shown(origin)}, line {number}: expected {expected}, got {got}.")


# ------------------------------------------------------------------------------------------------
# Assign the labels of a label file to the images that it names.

NUM_VALIDATION = 50_000
_VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.", re.IGNORECASE)
_SHOWN = 5


def match_labels(table: LabelTable, image_ids: Sequence[str], wrapper: str) -> dict[str, int]:
    """The label of every image by its id; UserError if any image has none.

    `wrapper`: a folder around all images ("val/") that the names in the file may leave out. Names
    are compared whole, without it, without their folders, and without their ending as well, until
    one way gives every image a label.
    """
    if table.ordered:
        return _in_order(table, image_ids)

    keys: tuple[Callable[[str], str], ...] = (
        lambda name: name,
        lambda name: name.removeprefix(wrapper),
        lambda name: PurePosixPath(name).name,
        lambda name: PurePosixPath(name).stem,
    )
    found: dict[str, int] = {}
    for key in keys:
        by_key: dict[str, set[int]] = {}
        for name, label in table.named.items():
            by_key.setdefault(key(name), set()).add(label)
        own = {image_id: key(image_id) for image_id in image_ids}
        if len(set(own.values())) < len(own):  # two images of one key
            continue
        labels = {image_id: by_key.get(name, set()) for image_id, name in own.items()}
        one = {image_id: next(iter(of)) for image_id, of in labels.items() if len(of) == 1}
        found = max(found, one, key=len)
    if missing := [image_id for image_id in image_ids if image_id not in found]:
        raise UserError(
            f"{shown(table.origin)} leaves {len(missing)} of {len(image_ids)} images without a "
            f"label: {some(missing)}; its {len(table.named)} names are {some([*table.named])}. "
            "Expected a line for each, with its path in the folder or zip, ending included."
        )
    return found


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown(name, 100) for name in names[:_SHOWN]) + more or "none"


def validation_number(image_id: str) -> int | None:
    """17 for .../ILSVRC2012_val_00000017.JPEG; None for any other name."""
    match = _VALIDATION_IMAGE.match(PurePosixPath(image_id).name)
    return int(match[1]) if match else None


def _in_order(table: LabelTable, image_ids: Sequence[str]) -> dict[str, int]:
    """The k-th label for the k-th file name; with ImageNet's 50 000 labels, for image number k."""
    numbers = [validation_number(image_id) or 0 for image_id in image_ids]
    if len(table.ordered) == NUM_VALIDATION and all(numbers):
        return {i: table.ordered[number - 1] for i, number in zip(image_ids, numbers, strict=True)}
    if len(table.ordered) != len(image_ids):
        raise UserError(
            f"{shown(table.origin)} holds {len(table.ordered)} labels without names for "
            f"{len(image_ids)} images; expected one for each. Give a CSV `file,label` instead."
        )
    by_name = sorted(image_ids, key=lambda image_id: (PurePosixPath(image_id).name, image_id))
    return dict(zip(by_name, table.ordered, strict=True))


# ------------------------------------------------------------------------------------------------
# Which of the sources there is.

_FLAT_LABEL_FILES = (
    *("val.txt", "LOC_val_solution.csv", "*synset_labels.txt"),
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
    wrapper = ""  # the folders that all images lie in, such as "imagenet/val/"
    for parts in zip(*(PurePosixPath(name).parts[:-1] for name in image_ids), strict=False):
        if len(set(parts)) > 1 or is_synset(parts[0]):
            break
        wrapper += f"{parts[0]}/"
    if label_file is not None:
        return _from_table(_read(label_file), image_ids, wrapper)
    parents = PurePosixPath(wrapper).parts
    for depth in range(len(parents), -1, -1):
        base = "".join(parent + "/" for parent in parents[:depth])
        if base + "labels.csv" in files.names:
            return _from_table(_read(base + "labels.csv", files), image_ids, base)
    inner = {image_id: image_id.removeprefix(wrapper) for image_id in image_ids}
    tops = sorted({path.partition("/")[0] for path in inner.values() if "/" in path})
    if len(tops) > 1 and all(top.lower() in _SPLITS for top in tops):  # which are no classes
        raise UserError(
            f"{shown(files.path)} holds several splits: {some(tops)}. Expected the images of one: "
            f"give that folder (such as {shown(files.path / tops[-1])}), or a zip of it."
        )
    return (
        _from_synsets(files, inner)
        or _from_class_folders(inner)
        or _from_validation_file(files, image_ids, wrapper)
        or Labels({}, "none", "The images carry no labels.")
    )


def _read(place: str | Path, files: Files | None = None) -> LabelTable:
    """The table in a file, be it one of the images' folder or zip."""
    if files is None:
        return parse_label_file(shown(place), LABEL_FILE.bytes(Path(place)))
    origin = f"{files.path.name}/{place}"
    try:
        return parse_label_file(origin, files.read(str(place)))
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
                return _from_table(_read(name, files), image_ids, wrapper)
        for path in sorted(files.path.absolute().parent.glob(pattern)):
            return _from_table(_read(path), image_ids, wrapper)
    return None


def _from_synsets(files: Files, inner: Mapping[str, str]) -> Labels | None:
    """ImageNet class indices of synset folders, or of synsets with which all flat files' names
    start, as ImageNet's training images do; None without any. `inner`: paths in the wrapper."""
    synsets: dict[str, str | None] = {}
    for image_id, path in inner.items():  # the innermost folder named like a synset
        folders = PurePosixPath(path).parts[-2::-1]
        synsets[image_id] = next(filter(is_synset, folders), None)
    where = f"of {len(set(synsets.values()))} synset folders"
    if not any(synsets.values()):
        synsets = {image_id: path.partition("_")[0] for image_id, path in inner.items()}
        if not all(synset in synset_indices() for synset in synsets.values()):
            return None
        where = "of the synsets in the file names"
    strays = [image_id for image_id, synset in synsets.items() if not synset]
    unknown = sorted(set(filter(None, synsets.values())) - synset_indices().keys())
    if strays or unknown:
        faults = [f"images outside its synset folders: {some(strays)}"] if strays else []
        faults += [f"synsets that are none of ILSVRC 2012's: {some(unknown)}"] if unknown else []
        raise UserError(
            f"{shown(files.path)} holds {'; '.join(faults)}. Take them out. A CSV `file,label` "
            "for --labels names the classes of --data, --images and --from, of no other option."
        )
    by_image = {image_id: synset_indices()[str(own)] for image_id, own in synsets.items()}
    return Labels(by_image, "synset", f"Labels are the ImageNet class indices (0..999) {where}.")


def _from_class_folders(inner: Mapping[str, str]) -> Labels | None:
    """From class folders of any other name; None where images also lie beside the folders."""
    if not all("/" in path for path in inner.values()):
        return None
    folders = sorted({path.partition("/")[0] for path in inner.values()})
    index = {folder: place for place, folder in enumerate(folders)}
    how = f"Labels are the places of the {len(folders)} class folders in sorted order"
    if all(map(is_class_index, folders)):
        index = {folder: int(folder) for folder in folders}
        how = f"Labels are the numbers that name the {len(folders)} class folders"
    named = some([f"{folder} = {index[folder]}" for folder in sorted(index, key=index.__getitem__)])
    by_image = {image_id: index[path.partition("/")[0]] for image_id, path in inner.items()}
    return Labels(by_image, "folder", f"{how} ({named}).")


def is_class_index(folder: str) -> bool:
    """Whether a folder's name is a class index: `17`, but not `017` and not `20240131`."""
    return re.fullmatch(r"0|[1-9][0-9]{0,9}", folder) is not None and int(folder) < MOST_CLASSES
