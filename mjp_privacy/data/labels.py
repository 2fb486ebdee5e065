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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Literal

from mjp_privacy.core.errors import NoFile, UserError
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import ImageError
from mjp_privacy.data.files import Files, missing_path
from mjp_privacy.data.label_files import (
    LABEL_FILE,
    MOST_CLASSES,
    LabelTable,
    is_synset,
    parse_label_file,
    synset_indices,
)
from mjp_privacy.data.label_matching import match_labels, some, validation_number

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
