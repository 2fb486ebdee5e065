"""Open any folder or zip of images and iterate over it as tensors.

for image, label, image_id in load_images("val", size=224, limit=10): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.data.decoding import ImageError
from mjp_privacy.data.embedded import EMBEDDED, embedded_images
from mjp_privacy.data.files import from_home, image_names, open_files
from mjp_privacy.data.flat_pictures import FLAT, flat_pictures
from mjp_privacy.data.labels import find_labels
from mjp_privacy.data.source import ImageRecord, ImageSource
from mjp_privacy.data.subset import spread_subset
from mjp_privacy.data.transforms import Preprocessing


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
    decoded here. Raises UserError if there are no
    images, or labels for only some of them.
    """
    if str(path) == EMBEDDED:
        if labels is not None:
            raise UserError(f"The {EMBEDDED} images have no labels; expected no label file.")
        return embedded_images()
    if str(path) == FLAT:
        if labels is not None:
            raise UserError(f"The {FLAT} pictures have no labels; expected no label file.")
        return flat_pictures()
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
    return _load(source, records, preprocessing, min_side, on_error)


def _load(
    source: ImageSource,
    records: Sequence[ImageRecord],
    preprocessing: Preprocessing,
    min_side: int,
    on_error: Callable[[ImageError], object] | None,
) -> Iterator[LoadedImage]:
    for record in records:
        try:
            picture = source.decode(record, min_side=min_side)
        except ImageError as error:
            if on_error is None:
                raise
            on_error(error)
            continue
        yield LoadedImage(preprocessing(picture), record.label, record.image_id)
