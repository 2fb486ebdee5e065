"""Any folder or zip of images: opened, chosen from, and iterated over as tensors.

for image, label, image_id in load_images("val", size=224, limit=10): ...
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
from PIL import Image

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.read import FileKind
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import Size, height_width, size_text
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import ImageError, check_header, decode_image
from mjp_privacy.data.files import (
    EMBEDDED,
    Files,
    from_home,
    image_names,
    open_files,
    place_of,
)
from mjp_privacy.data.labels import LabelSource, find_labels

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ImageRecord:
    """One image, not yet read.

    `image_id` is its path inside the folder or zip. `group` names the photograph it was cut from,
    by default its own id: images of one group are not independent in a bootstrap.
    """

    image_id: str
    label: int | None = None
    label_source: LabelSource = "none"
    group: str = ""

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", self.image_id)


@dataclass(frozen=True)
class ImageSource:
    """Records sorted by their ids; either all of them have labels or none. It can be pickled."""

    path: Path
    records: tuple[ImageRecord, ...]
    labels_described: str
    files: Files = field(repr=False)

    def read_bytes(self, record: ImageRecord) -> bytes:
        """The image file as stored. Raises ImageError if it cannot be read."""
        with _named(record):
            return self.files.read(record.image_id)

    def decode(self, record: ImageRecord, *, min_side: int = 1) -> Image.Image:
        """The upright 8-bit RGB picture; ImageError where it is unreadable or too small."""
        with _named(record):
            return decode_image(self.files.read(record.image_id), min_side=min_side)


@contextmanager
def _named(record: ImageRecord) -> Iterator[None]:
    """An ImageError in this block gets the image's id."""
    try:
        yield
    except ImageError as error:
        raise ImageError(error.reason, record.image_id) from error


# ------------------------------------------------------------------------------------------------
# A seeded order of the images; the subset of a smaller limit is a prefix of that of a larger.


def spread_subset(
    records: Sequence[ImageRecord], limit: int | None, seed: int
) -> tuple[ImageRecord, ...]:
    """The first `limit` records (None: all) of an order in which the classes take turns.

    The order depends on (seed, image_id, label) alone: it is the same on every machine, and limit
    10 is a prefix of limit 20. Of unlabelled images the groups take turns.
    """
    _check_limit(limit)
    turns: Counter[str] = Counter()
    order = []
    for record in sorted(records, key=lambda r: derive_seed("image order", seed, r.image_id)):
        unlabelled = record.label is None
        name = f"group {record.group}" if unlabelled else f"label {record.label}"
        place = derive_seed("class order", seed, name)
        order.append((turns[name], place, record.image_id, record))
        turns[name] += 1
    order.sort(key=lambda entry: entry[:3])
    return tuple(record for *_, record in order)[:limit]


def readable_subset(
    source: ImageSource,
    records: Sequence[ImageRecord],
    limit: int | None,
    seed: int,
    *,
    min_side: int = 1,
) -> tuple[tuple[ImageRecord, ...], dict[ImageRecord, str]]:
    """`spread_subset` filled from files that are images, and why the others were passed over.

    Headers are read of as many files as it takes; without a limit until one is an image, and all
    are taken. UserError where none is.
    """
    _check_limit(limit)
    order = spread_subset(records, None, seed)
    chosen: list[ImageRecord] = []
    reasons: dict[ImageRecord, str] = {}
    for record in order:
        if len(chosen) == limit:
            break
        try:
            check_header(source.files.read(record.image_id), min_side=min_side)
        except ImageError as error:
            reasons[record] = error.reason
            continue
        if limit is None:
            return order, {}
        chosen.append(record)
    if not chosen and reasons:
        record, reason = next(iter(reasons.items()))
        raise UserError(
            f"None of the {len(reasons)} files of {source.path} is a readable image: "
            f"{record.image_id} is {reason}. Give a folder or zip of photographs."
        )
    return tuple(chosen), reasons


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise UserError(f"Expected a limit of at least 1 image, got {limit}. Leave it out for all.")


# ------------------------------------------------------------------------------------------------
# From a picture to the model's input pixels; normalisation is left to the model.

Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class Preprocessing:
    """Short side to `resize` pixels, then the central square of side `size`; or, with `squash`, the
    whole picture to size × size, whatever its shape.

    The same as torchvision's Resize and CenterCrop; a picture that has this size is not changed.

        Preprocessing(224)(picture)  # (3, 224, 224) float32 in [0, 1]
        Preprocessing((96, 64))(picture)  # (3, 96, 64): of the picture's central part of that shape

    resize  of a rectangle, what the shorter of its sides would become; the picture just covers a
            rectangle of that size
    """

    size: Size
    resize: int | None = None  # None: round(size · 248 / 224), of the shorter side
    interpolation: Interpolation = "bicubic"
    squash: bool = False

    @classmethod
    def robustness_sets(cls, size: Size) -> Preprocessing:
        """As the official scripts of ImageNet-C, -A and -O cut a photograph: short side 256 for a
        side of 224, bilinear."""
        return cls(size, round(min(height_width(size)) * 256 / 224), "bilinear")

    def __post_init__(self) -> None:
        if self.interpolation not in get_args(Interpolation):
            raise unknown_name("interpolation", self.interpolation, get_args(Interpolation))
        if not 1 <= min(height_width(self.size)) <= self.short_side:
            raise UserError(
                "Expected 1 ≤ size ≤ resize: the crop is taken from the resized picture; got "
                f"size {size_text(self.size)} and resize {self.short_side}."
            )

    @property
    def short_side(self) -> int:
        """The short side before the crop, in pixels."""
        shorter = min(height_width(self.size))
        return round(shorter * 248 / 224) if self.resize is None else self.resize

    def __call__(self, picture: Image.Image) -> Tensor:
        """An RGB picture to (3, H, W) float32 in [0, 1]: its 8-bit values over 255."""
        import torch

        height, width = height_width(self.size)
        wanted, how = (width, height), Image.Resampling[self.interpolation.upper()]
        if picture.size != wanted and self.squash:
            picture = picture.resize(wanted, how)
        elif picture.size != wanted:
            shares = zip(picture.size, wanted, strict=True)
            side, of = min(shares, key=lambda share: share[0] / share[1])  # which the crop fills
            factor = self.short_side * of, min(wanted) * side
            across, down = (int(factor[0] * one / factor[1]) for one in picture.size)
            left, top = round((across - width) / 2), round((down - height) / 2)
            box = (left, top, left + width, top + height)
            picture = picture.resize((across, down), how).crop(box)
        pixels = np.array(picture.convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32) / 255


# ------------------------------------------------------------------------------------------------
# Opened.


class LoadedImage(NamedTuple):
    """One image as the model will see it, before normalisation."""

    image: Tensor  # (3, size, size) float32 in [0, 1], multiples of 1/255
    label: int | None
    image_id: str


def open_images(path: str | Path, labels: str | Path | None = None) -> ImageSource:
    """The images at `path`: a flat folder, class folders, ImageNet val, or a zip of any of these.

    `labels` is a label file; without one, labels are looked for as `mjp_privacy.data.labels` says.
    The word "embedded" opens the pictures that come along. Nothing else is decoded here.
    Raises UserError if there are no images, or labels for only some of them.
    """
    if str(path) == EMBEDDED:
        if labels is not None:
            raise UserError(f"The {path} pictures have no labels; expected no label file.")
        return embedded_images()
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
    on_error: Callable[[ImageError], object] | None = None,
) -> Iterator[LoadedImage]:
    """Images of a folder or zip as (image (3, size, size) float32 in [0, 1], label, image_id).

    `limit` and `seed` choose as `spread_subset` does. An image that cannot be read raises
    ImageError, or is left out and `on_error` called with it.
    """
    preprocessing = Preprocessing(size)
    source = open_images(path, labels)
    records = spread_subset(source.records, limit, seed)

    def loaded() -> Iterator[LoadedImage]:
        for record in records:
            try:
                picture = source.decode(record)
            except ImageError as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
            yield LoadedImage(preprocessing(picture), record.label, record.image_id)

    return loaded()  # so that mistakes in the arguments are said at once


# ------------------------------------------------------------------------------------------------
# Crops of six photographs that are in every scikit-image wheel: to try things on, no download.

CROP_SIDE = 224
"""Side of a crop in pixels, of the photograph and of the picture."""
PHOTOGRAPH = FileKind("a photograph of scikit-image", "Install scikit-image again.")
PHOTOGRAPHS = {
    "astronaut": "astronaut.png",
    "camera": "camera.png",
    "chelsea": "chelsea.png",
    "coffee": "coffee.png",
    "motorcycle": "motorcycle_left.png",
    "rocket": "rocket.jpg",
}
"""Name to file. Of the stereo pair only one is used; drawings, textures and micrographs are not."""


@dataclass(frozen=True)
class Crops:
    """Crops of photographs as named PPM files, cut out when they are read."""

    path: Path
    boxes: Mapping[str, tuple[int, int, int, int]]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all pictures, sorted."""
        return tuple(self.boxes)

    def read(self, name: str) -> bytes:
        """The picture as PPM, which is not compressed: its bytes depend on no zlib."""
        stream = io.BytesIO()
        photograph(name.partition("/")[0]).crop(self.boxes[name]).save(stream, "PPM")
        return stream.getvalue()


def embedded_images() -> ImageSource:
    """20 crops of six photographs, without labels, as grids of squares in their middle;
    "astronaut/0_1" is the crop in row 0, column 1."""
    boxes: dict[str, tuple[int, int, int, int]] = {}
    for name in PHOTOGRAPHS:
        width, height = photograph(name).size
        left, top = (width % CROP_SIDE) // 2, (height % CROP_SIDE) // 2
        for row in range(height // CROP_SIDE):
            for column in range(width // CROP_SIDE):
                x, y = left + column * CROP_SIDE, top + row * CROP_SIDE
                boxes[f"{name}/{row}_{column}"] = (x, y, x + CROP_SIDE, y + CROP_SIDE)
    files = Crops(data_folder(), dict(sorted(boxes.items())))
    records = tuple(ImageRecord(name, group=name.partition("/")[0]) for name in files.names)
    return ImageSource(Path(EMBEDDED), records, "The embedded images carry no labels.", files)


def data_folder() -> Path:
    """The folder skimage/data, without importing skimage."""
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise UserError(
            "The embedded images are scikit-image's, which is not installed. "
            "Run `pip install scikit-image`, or give a folder of images."
        )
    return Path(spec.origin).parent / "data"


@cache
def photograph(name: str) -> Image.Image:
    """A picture of scikit-image's, RGB; UserError where the file is missing or damaged."""
    path = data_folder() / PHOTOGRAPHS[name]
    try:
        return decode_image(PHOTOGRAPH.bytes(path))
    except (BadFile, ImageError) as error:
        raise UserError(
            f"Expected the photograph {path} of scikit-image, got: {error}. "
            "Install scikit-image again, from its wheel."
        ) from error


# ------------------------------------------------------------------------------------------------
# Where a command reads and writes, looked at before torch is imported, which takes seconds.


def check_place(path: str | Path | None) -> None:
    """Raise the UserError of `open_images` where there is no folder or zip. No path, an empty one
    and the word `embedded` pass: `open_images` deals with them."""
    if path is not None and str(path).strip() and str(path) != EMBEDDED:
        place_of(from_home(path))


def keep_apart(
    out: str | Path, inputs: Mapping[str, str | Path | None], *, around: bool = False
) -> None:
    """Raise where the output is an input, or one of the two lies inside the other: the next run
    would read its own output. keep_apart("photos/run", {"--images": "photos"}) is refused.

    inputs  what is read, by the option that names it; None and the word `embedded` pass
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
