"""Photographs that come with every scikit-image wheel: images to try things on, no download.

They belong to scikit-image's minimal data set, which is part of its wheel. Newer pictures of
scikit-image are fetched on demand and are not used here.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind
from mjp_privacy.data.decoding import ImageError, decode_image
from mjp_privacy.data.images import ImageRecord, ImageSource

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


# ------------------------------------------------------------------------------------------------
# Pictures with flat regions, made from what comes with scikit-image: no download.
#
# Equal, black and white patches are where X-rays, drawings and product photographs differ from
# ordinary photographs. There are 24 pictures of four kinds:
#
#     letterboxed   a wide or a tall part of a photograph between black or white bars
#     drawing       a silhouette, a logo, an X-ray phantom, and shapes drawn on white
#     half_blurred  a photograph with one half out of focus
#     saturated     an overexposed photograph, or one with its shadows cut off at black

FLAT = "flat"
"""The word that opens these pictures in place of a path."""

BAR = 48  # pixels of each bar of a letterboxed picture of side SIDE
BLUR = 10.0  # standard deviation in pixels
WHITE = (255, 255, 255)
SHORT = {"wide": (SIDE, SIDE - 2 * BAR), "tall": (SIDE - 2 * BAR, SIDE)}
DRAWINGS = {"horse": "horse.png", "logo": "logo.png", "phantom": "phantom.png"}

Maker = Callable[[Path], Image.Image]


@dataclass(frozen=True)
class FlatFiles:
    """The pictures as named PPM files, made when they are read."""

    path: Path
    names: tuple[str, ...]

    def read(self, name: str) -> bytes:
        """The picture as PPM, which is not compressed: its bytes depend on no zlib."""
        stream = io.BytesIO()
        makers()[name](self.path).save(stream, "PPM")
        return stream.getvalue()


def flat_pictures() -> ImageSource:
    """The 24 pictures, SIDE × SIDE pixels, without labels; the group of a record is its source."""
    records = tuple(
        ImageRecord(name, group=name.partition("/")[2].partition("_")[0])
        for name in sorted(makers())
    )
    files = FlatFiles(data_folder(), tuple(record.image_id for record in records))
    return ImageSource(Path(FLAT), records, "The flat pictures carry no labels.", files)


def makers() -> dict[str, Maker]:
    """What makes each picture, by its name: "letterboxed/coffee_wide" and so on."""
    found: dict[str, Maker] = {}
    for number, name in enumerate(PHOTOGRAPHS):
        shape = "tall" if number % 3 == 2 else "wide"
        colour = WHITE if number == 4 else (0, 0, 0)
        found[f"letterboxed/{name}_{shape}"] = partial(_letterboxed, name, shape, colour)
        side = ("left", "right", "top", "bottom")[number % 4]
        found[f"half_blurred/{name}_{side}"] = partial(_half_blurred, name, side)
        exposure = "shadows" if number % 2 else "light"
        found[f"saturated/{name}_{exposure}"] = partial(_saturated, name, exposure)
    for name in DRAWINGS:
        found[f"drawing/{name}"] = partial(_drawing, name)
    for name, draw in (("chart", _chart), ("shapes", _shapes), ("circuit", _circuit)):
        found[f"drawing/{name}"] = partial(_drawn, draw)
    return found


def _photograph_part(folder: Path, name: str, shape: tuple[int, int]) -> Image.Image:
    """The largest central part of a photograph with this shape, resized to it."""
    picture = opened_picture(folder / PHOTOGRAPHS[name])
    scale = min(picture.width / shape[0], picture.height / shape[1])
    width, height = scale * shape[0], scale * shape[1]
    left, top = (picture.width - width) / 2, (picture.height - height) / 2
    box = (left, top, left + width, top + height)
    return picture.resize(shape, Image.Resampling.BICUBIC, box=box)


def _letterboxed(name: str, shape: str, colour: tuple[int, ...], folder: Path) -> Image.Image:
    """A wide or tall part of a photograph between two bars."""
    inner = _photograph_part(folder, name, SHORT[shape])
    picture = Image.new("RGB", (SIDE, SIDE), colour)
    picture.paste(inner, ((SIDE - inner.width) // 2, (SIDE - inner.height) // 2))
    return picture


def _half_blurred(name: str, side: str, folder: Path) -> Image.Image:
    """A photograph with the half of this side out of focus."""
    picture = _photograph_part(folder, name, (SIDE, SIDE))
    half = SIDE // 2
    left, top = half * (side == "right"), half * (side == "bottom")
    right = half if side == "left" else SIDE
    bottom = half if side == "top" else SIDE
    blurred = picture.filter(ImageFilter.GaussianBlur(BLUR))
    picture.paste(blurred.crop((left, top, right, bottom)), (left, top))
    return picture


def _saturated(name: str, exposure: str, folder: Path) -> Image.Image:
    """A photograph of 2.5 times its light, or without its darker half."""
    picture = _photograph_part(folder, name, (SIDE, SIDE))
    if exposure == "light":
        return picture.point([min(255, value * 5 // 2) for value in range(256)] * 3)
    return picture.point([max(0, 2 * value - 255) for value in range(256)] * 3)


def _drawing(name: str, folder: Path) -> Image.Image:
    """One of scikit-image's drawings on a white square; the phantom is black as X-rays are."""
    drawn = opened_picture(folder / DRAWINGS[name])
    drawn.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC)
    picture = Image.new("RGB", (SIDE, SIDE), (0, 0, 0) if name == "phantom" else WHITE)
    picture.paste(drawn, ((SIDE - drawn.width) // 2, (SIDE - drawn.height) // 2))
    return picture


def _drawn(draw: Callable[[ImageDraw.ImageDraw, int], None], folder: Path) -> Image.Image:
    """A drawing made here, four times as large and then reduced, so that its edges are smooth."""
    picture = Image.new("RGB", (4 * SIDE, 4 * SIDE), WHITE)
    draw(ImageDraw.Draw(picture), 4 * SIDE)
    return picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _chart(draw: ImageDraw.ImageDraw, side: int) -> None:
    """Bars of a few colours on two axes."""
    unit = side // 16
    colours = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
    for number, height in enumerate((4, 7, 10, 6, 9)):
        left = (2 + 5 * number // 2) * unit + unit // 3
        draw.rectangle(
            (left, (14 - height) * unit, left + 3 * unit // 2, 14 * unit), colours[number]
        )
    draw.line((2 * unit, unit, 2 * unit, 14 * unit, 15 * unit, 14 * unit), "black", unit // 6)


def _shapes(draw: ImageDraw.ImageDraw, side: int) -> None:
    """A disc, a triangle and a frame."""
    unit = side // 16
    draw.ellipse((unit, 2 * unit, 8 * unit, 9 * unit), "#e8c547", "black", unit // 8)
    draw.polygon((9 * unit, 14 * unit, 15 * unit, 13 * unit, 12 * unit, 5 * unit), "#3a6ea5")
    draw.rectangle((2 * unit, 10 * unit, 7 * unit, 15 * unit), None, "#a33b20", unit // 4)


def _circuit(draw: ImageDraw.ImageDraw, side: int) -> None:
    """Thin black lines, as in a plan or a diagram."""
    unit = side // 16
    for number in range(5):
        at = (2 + 3 * number) * unit
        draw.line(
            (at, unit, at, (15 - number) * unit, side - unit, (15 - number) * unit), "black", 6
        )
        draw.ellipse(
            (at - unit // 3, 4 * unit, at + unit // 3, 14 * unit // 3), "white", "black", 6
        )
