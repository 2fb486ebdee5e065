"""Open any folder or zip of images and iterate over it as tensors.

for image, label, image_id in load_images("val", size=224, limit=10): ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import ImageError
from mjp_privacy.data.files import from_home, image_names, open_files, place_of
from mjp_privacy.data.images import ImageRecord, ImageSource, Preprocessing, spread_subset
from mjp_privacy.data.labels import find_labels
from mjp_privacy.data.made import EMBEDDED, FLAT, embedded_images, flat_pictures

if TYPE_CHECKING:
    from torch import Tensor


MADE: Mapping[str, Callable[[], ImageSource]] = {EMBEDDED: embedded_images, FLAT: flat_pictures}
"""The words that open pictures that come along."""


class LoadedImage(NamedTuple):
    """One image as the model will see it, before normalisation."""

    image: Tensor  # (3, size, size) float32 in [0, 1], multiples of 1/255
    label: int | None
    image_id: str


def open_images(path: str | Path, labels: str | Path | None = None) -> ImageSource:
    """The images at `path`: a flat folder, class folders, ImageNet val, or a zip of any of these.

    `labels` is a label file; without one, labels are looked for as `mjp_privacy.data.labels` says.
    The word "embedded" opens the photographs that come with scikit-image, and "flat" pictures with
    flat regions made from these; a folder of that name is opened by its absolute path. Nothing is
    decoded here. Raises UserError if there are no images, or labels for only some of them.
    """
    if make := MADE.get(str(path)):
        if labels is not None:
            raise UserError(f"The {path} pictures have no labels; expected no label file.")
        return make()
    if not str(path).strip():
        raise UserError("Expected a folder or a zip of images, got an empty path. Name one.")
    files = open_files(from_home(path))
    image_ids = image_names(files)
    labelling = find_labels(files, image_ids, from_home(labels) if labels else None)
    records = tuple(
        ImageRecord(image_id, labelling.by_image.get(image_id), labelling.source)
        for image_id in image_ids
    )
    return ImageSource(files.path, records, labelling.described, files)


def load_images(
    path: str | Path,
    *,
    size: int,
    labels: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    min_side: int = 1,
    on_error: Callable[[ImageError], object] | None = None,
) -> Iterator[LoadedImage]:
    """Images of a folder or zip as (image (3, size, size) float32 in [0, 1], label, image_id).

    `limit` and `seed` choose as `spread_subset` does. An image that cannot be read raises
    ImageError, unless `on_error` is given: then it is called with the error and the image is left
    out.
    """
    preprocessing = Preprocessing(size)
    source = open_images(path, labels)
    records = spread_subset(source.records, limit, seed)

    def loaded() -> Iterator[LoadedImage]:
        for record in records:
            try:
                picture = source.decode(record, min_side=min_side)
            except ImageError as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
            yield LoadedImage(preprocessing(picture), record.label, record.image_id)

    return loaded()  # so that mistakes in the arguments are said at once


# ------------------------------------------------------------------------------------------------
# Where a command reads and writes, looked at before torch is imported, which takes seconds.


def check_place(path: str | Path | None) -> None:
    """Raise the UserError of `open_images` where there is no folder or zip. No path, an empty one
    and the words `embedded` and `flat` pass: `open_images` deals with them."""
    if path is not None and str(path).strip() and str(path) not in MADE:
        place_of(from_home(path))


def keep_apart(
    out: str | Path, inputs: Mapping[str, str | Path | None], *, around: bool = False
) -> None:
    """Raise where the output is an input, or one of the two lies inside the other: the next run
    would read its own output. keep_apart("photos/run", {"--images": "photos"}) is refused.

    inputs  what is read, by the option that names it; None, or a word such as `embedded` in place
            of a path, is no place
    around  inputs may lie inside `out`: what is written there has names that are nobody else's
    """
    where = Path(os.path.realpath(out))
    for option, given in inputs.items():
        try:
            source = Path(given or "").expanduser().resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            continue  # nothing is there
        if given is None:
            continue
        if where == source:
            fault = f"is {option} itself"
        elif where.is_relative_to(source):
            fault = f"lies inside {option} {shown(given)}: what is written there would be read"
        elif not around and source.is_dir() and source.is_relative_to(where):
            fault = f"holds {option} {shown(given)}: what is written would stand around it"
        else:
            continue
        raise UserError(
            f"--out {shown(out)} {fault}. Expected a place of its own: give another --out, beside "
            "what is read."
        )
