"""Photographs that come with every scikit-image wheel: images to try things on, no download.

They belong to scikit-image's minimal data set, which is part of its wheel. Newer pictures of
scikit-image are fetched on demand and are not used here.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind
from mjp_privacy.data.decoding import ImageError, decode_image
from mjp_privacy.data.source import ImageRecord, ImageSource

EMBEDDED = "embedded"
"""The word that opens these images in place of a path."""

SIDE = 224
"""Side of a crop in the photograph, in pixels; a size of 224 therefore needs no resampling."""

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
class EmbeddedFiles:
    """The crops as named PPM files; "astronaut/0_1" is the crop in row 0 and column 1."""

    path: Path
    size: int
    names: tuple[str, ...]

    def read(self, name: str) -> bytes:
        """The crop as PPM, which is not compressed: its bytes do not depend on the zlib version."""
        photograph, _, place = name.partition("/")
        row, column = (int(number) for number in place.split("_"))
        crop = _crops(_photograph(self.path, photograph))[row, column]
        stream = io.BytesIO()
        if crop.size != (self.size, self.size):
            crop = crop.resize((self.size, self.size), Image.Resampling.BICUBIC)
        crop.save(stream, "PPM")
        return stream.getvalue()


class EmbeddedSource(ImageSource):
    """The crops as an ImageSource. The group of a record is its photograph."""


def embedded_images(size: int = SIDE) -> EmbeddedSource:
    """20 crops of six photographs, size × size pixels, without labels.

    The crops are the squares of side 224 that fit into each photograph without overlap, as a grid
    in its middle; for other sizes they are resized (bicubic, antialiased).
    """
    if size < 1:
        raise UserError(f"Expected a size of at least 1 pixel, got {size}.")
    path = data_folder()
    records = tuple(
        ImageRecord(f"{name}/{row}_{column}", group=name)
        for name in PHOTOGRAPHS
        for row, column in sorted(_crops(_photograph(path, name)))
    )
    files = EmbeddedFiles(path, size, tuple(record.image_id for record in records))
    return EmbeddedSource(Path(EMBEDDED), records, "The embedded images carry no labels.", files)


def _crops(photograph: Image.Image) -> dict[tuple[int, int], Image.Image]:
    """The crops of a photograph by (row, column)."""
    rows, columns = photograph.height // SIDE, photograph.width // SIDE
    top, left = (photograph.height - rows * SIDE) // 2, (photograph.width - columns * SIDE) // 2
    boxes = {
        (row, column): (left + column * SIDE, top + row * SIDE)
        for row in range(rows)
        for column in range(columns)
    }
    return {place: photograph.crop((x, y, x + SIDE, y + SIDE)) for place, (x, y) in boxes.items()}


@cache
def _photograph(folder: Path, name: str) -> Image.Image:
    return opened_picture(folder / PHOTOGRAPHS[name])


def opened_picture(path: Path) -> Image.Image:
    """A picture of scikit-image's, RGB; UserError where the file is missing or damaged."""
    try:
        return decode_image(PHOTOGRAPH.bytes(path))
    except (BadFile, ImageError) as error:
        raise UserError(
            f"Expected the photograph {path} of scikit-image, got: {error}. "
            "Install scikit-image again, from its wheel."
        ) from error


def data_folder() -> Path:
    """The folder skimage/data, without importing skimage."""
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise UserError(
            "The embedded images are scikit-image's, which is not installed. "
            "Run `pip install scikit-image`, or give a folder of images."
        )
    return Path(spec.origin).parent / "data"
