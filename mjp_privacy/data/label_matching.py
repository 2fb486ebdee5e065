"""Assign the labels of a label file to the images that it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.data.label_files import LabelTable

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
