"""Where the labels of a folder or zip come from, in order of precedence.

1. the label file that the caller names
2. `labels.csv` inside, with the header `file,label`
3. synset folders: the ImageNet class index
4. other class folders: their number if all their names are numbers, else their place when sorted
5. nothing: the images carry no labels

A folder around all images (such as `val/` in a zip of it) does not count as a class folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import MOST_LETTERS, FileKind, csv_rows
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import ImageError
from mjp_privacy.data.files import Files

# ------------------------------------------------------------------------------------------------
# Label files: a CSV with a name and a label in each line, as its header says: one of NAMES, and
# `label`, a class index or a synset. Kaggle's LOC_val_solution.csv has ImageId,PredictionString,
# of which the first word counts.

NAMES = ("file", "image", "image_id", "filename", "imageid")
KAGGLES = "predictionstring"
NUM_IMAGENET = 1000
MOST_CLASSES = 1_000_000
"""Class indices stay below it."""
LABEL_FILE = FileKind(
    "a label file", "A CSV with the header `file,label`, saved as UTF-8, always works."
)
_SYNSET = re.compile(r"n[0-9]{8}")
_INDEX = re.compile(r"[0-9]+")

LabelSource = Literal["csv", "synset", "folder", "file", "none"]


@cache
def synset_indices() -> dict[str, int]:
    """Class index by synset (n01440764): its place among the sorted 1000 of ILSVRC 2012."""
    from timm.data.imagenet_info import ImageNetInfo

    info: Any = ImageNetInfo()  # its methods are not annotated
    return {synset: index for index, synset in enumerate(info.label_names())}


def is_synset(text: str) -> bool:
    """Whether `text` looks like a synset; it need not be one of the 1000."""
    return _SYNSET.fullmatch(text) is not None


def parse_label_file(origin: str, content: bytes) -> dict[str, int]:
    """The labels in the bytes of a label file, by name. UserError if it is none, if a name is empty
    or has two labels, or if a label is neither an index nor one of ILSVRC 2012's synsets."""

    def wrong(number: int, expected: str, got: str) -> UserError:
        return UserError(f"{shown(origin)}, line {number}: expected {expected}, got {got}.")

    if len(content) > LABEL_FILE.max_bytes:
        size = f"{len(content) >> 20} MiB, more than {LABEL_FILE.max_bytes >> 20} MiB"
        raise LABEL_FILE.refusal(Path(origin), size)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LABEL_FILE.refusal(Path(origin), f"no UTF-8 text ({error})") from error
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MOST_LETTERS:
            raise wrong(number, "a name and its label", f"{len(line)} characters")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    header = {cell.strip().lower() for cell in first.split(",")}
    if header.isdisjoint(NAMES) or header.isdisjoint(("label", KAGGLES)):
        raise UserError(
            f"{shown(origin)} starts with {shown(repr(first[:80]))}; expected a CSV with the "
            "header `file,label`, or Kaggle's `ImageId,PredictionString`."
        )
    table = text.lstrip("\r\n")
    above = text[: len(text) - len(table)].count("\n")  # empty lines before the header
    rows = csv_rows(table, Path(origin), LABEL_FILE, (), column=lambda name: name.strip().lower())
    named: dict[str, int] = {}
    for number, row in rows:
        written = next((row[column] for column in NAMES if row.get(column)), "")
        name = written.strip().replace("\\", "/").removeprefix("./")
        if not name:
            raise wrong(above + number, "the name of an image", "none")
        said = (row["label"] if "label" in row else row[KAGGLES].split(" ")[0]).strip()
        if said in synset_indices():
            label = synset_indices()[said]
        elif _INDEX.fullmatch(said) and len(said) <= 20 and int(said) < MOST_CLASSES:
            label = int(said)
        else:
            expected = f"a class index below {MOST_CLASSES}, or one of ILSVRC 2012's 1000 synsets"
            raise wrong(above + number, expected, shown(repr(said), 80))
        if named.setdefault(name, label) != label:
            got = f"two, {named[name]} and {label}"
            raise wrong(above + number, f"one label of {shown(name)}", got)
    return named


# ------------------------------------------------------------------------------------------------
# Assign the labels of a label file to the images that it names.

_SHOWN = 5


def match_labels(
    origin: str, named: Mapping[str, int], image_ids: Sequence[str], wrapper: str
) -> dict[str, int]:
    """The label of every image by its id; UserError if any image has none.

    `wrapper`: a folder around all images ("val/") that the names in the file may leave out. Names
    are compared as a whole, then without folders and ending.
    """
    keys: tuple[Callable[[str], str], ...] = (
        lambda name: name.removeprefix(wrapper),
        lambda name: PurePosixPath(name).stem,
    )
    found: dict[str, int] = {}
    for key in keys:
        by_key: dict[str, set[int]] = {}
        for name, label in named.items():
            by_key.setdefault(key(name), set()).add(label)
        own = {image_id: key(image_id) for image_id in image_ids}
        if len(set(own.values())) < len(own):  # two images of one key
            continue
        labels = {image_id: by_key.get(name, set()) for image_id, name in own.items()}
        one = {image_id: next(iter(of)) for image_id, of in labels.items() if len(of) == 1}
        found = max(found, one, key=len)
    if missing := [image_id for image_id in image_ids if image_id not in found]:
        raise UserError(
            f"{shown(origin)} leaves {len(missing)} of {len(image_ids)} images without a label: "
            f"{some(missing)}; its {len(named)} names are {some([*named])}. "
            "Expected a line for each, with its path in the folder or zip: add lines."
        )
    return found


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown(name, 100) for name in names[:_SHOWN]) + more or "none"


# ------------------------------------------------------------------------------------------------
# Which of the sources there is.

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
        return _from_file(label_file, image_ids, wrapper)
    parents = PurePosixPath(wrapper).parts
    for depth in range(len(parents), -1, -1):
        base = "".join(parent + "/" for parent in parents[:depth])
        if base + "labels.csv" in files.names:
            return _from_file(base + "labels.csv", image_ids, base, files)
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
        or Labels({}, "none", "The images carry no labels.")
    )


def _from_file(
    place: str | Path, image_ids: Sequence[str], wrapper: str, files: Files | None = None
) -> Labels:
    """From a label file, be it one of the images' folder or zip."""
    origin = shown(place) if files is None else f"{files.path.name}/{place}"
    try:
        content = LABEL_FILE.bytes(Path(place)) if files is None else files.read(str(place))
    except ImageError as error:
        raise UserError(
            f"Expected a label file, but {shown(origin)} {error.reason}. Replace it, or take "
            "it out."
        ) from error
    by_image = match_labels(origin, parse_label_file(origin, content), image_ids, wrapper)
    count = len(set(by_image.values()))
    named = "/".join(Path(origin).parts[-2:])  # no full paths of this machine in reports
    described = f"Labels come from {named} ({len(by_image)} images, {count} classes)."
    return Labels(by_image, "csv", described)


def _from_synsets(files: Files, inner: Mapping[str, str]) -> Labels | None:
    """ImageNet class indices of synset folders; None without any. `inner`: paths in the wrapper."""
    synsets: dict[str, str | None] = {}
    for image_id, path in inner.items():  # the innermost folder named like a synset
        folders = PurePosixPath(path).parts[-2::-1]
        synsets[image_id] = next(filter(is_synset, folders), None)
    if not any(synsets.values()):
        return None
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
    count = len(set(synsets.values()))
    described = f"Labels are the ImageNet class indices (0..999) of {count} synset folders."
    return Labels(by_image, "synset", described)


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
