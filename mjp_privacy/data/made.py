"""Crops of six photographs that are in every scikit-image wheel: to try things on, no download."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind
from mjp_privacy.data.decoding import ImageError, decode_image
from mjp_privacy.data.files import EMBEDDED
from mjp_privacy.data.images import ImageRecord, ImageSource

SIDE = 224
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
        left, top = (width % SIDE) // 2, (height % SIDE) // 2
        for row in range(height // SIDE):
            for column in range(width // SIDE):
                x, y = left + column * SIDE, top + row * SIDE
                boxes[f"{name}/{row}_{column}"] = (x, y, x + SIDE, y + SIDE)
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
