"""Pictures made from the photographs in every scikit-image wheel: to try things on, no download.

embedded   crops of six photographs
flat       24 pictures with flat regions. Equal, black and white patches are where X-rays,
           drawings and product photographs differ from ordinary photographs:
  letterboxed   a wide or a tall part of a photograph between black or white bars
  drawing       a silhouette, a logo, an X-ray phantom, and shapes drawn on white
  half_blurred  a photograph with one half out of focus
  saturated     an overexposed photograph, or one with its shadows cut off at black
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind
from mjp_privacy.data.decoding import ImageError, decode_image
from mjp_privacy.data.files import EMBEDDED, FLAT
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
DRAWINGS = {"horse": "horse.png", "logo": "logo.png", "phantom": "phantom.png"}
BAR = 48  # pixels of each bar of a letterboxed picture of side SIDE
BLUR = 10.0  # standard deviation in pixels
BLACK, WHITE = (0, 0, 0), (255, 255, 255)

Maker = Callable[[], Image.Image]


@dataclass(frozen=True)
class MadeFiles:
    """Pictures as named PPM files, made when they are read."""

    path: Path
    makers: Mapping[str, Maker]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all pictures, sorted."""
        return tuple(self.makers)

    def read(self, name: str) -> bytes:
        """The picture as PPM, which is not compressed: its bytes depend on no zlib."""
        stream = io.BytesIO()
        self.makers[name]().save(stream, "PPM")
        return stream.getvalue()


def embedded_images() -> ImageSource:
    """20 crops of six photographs, without labels, as grids of squares in their middle;
    "astronaut/0_1" is the crop in row 0, column 1."""
    makers: dict[str, Maker] = {}
    for name in PHOTOGRAPHS:
        width, height = photograph(name).size
        left, top = (width % SIDE) // 2, (height % SIDE) // 2
        for row in range(height // SIDE):
            for column in range(width // SIDE):
                x, y = left + column * SIDE, top + row * SIDE
                box = (x, y, x + SIDE, y + SIDE)
                makers[f"{name}/{row}_{column}"] = partial(_crop, name, box)
    files = MadeFiles(data_folder(), dict(sorted(makers.items())))
    records = tuple(ImageRecord(name, group=name.partition("/")[0]) for name in files.names)
    return ImageSource(Path(EMBEDDED), records, "The embedded images carry no labels.", files)


def flat_pictures() -> ImageSource:
    """The 24 pictures, SIDE × SIDE pixels, without labels; the group of a record is its source."""
    files = MadeFiles(data_folder(), dict(sorted(_flat_makers().items())))
    records = tuple(
        ImageRecord(name, group=name.partition("/")[2].partition("_")[0]) for name in files.names
    )
    return ImageSource(Path(FLAT), records, "The flat pictures carry no labels.", files)


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
    path = data_folder() / {**PHOTOGRAPHS, **DRAWINGS}[name]
    try:
        return decode_image(PHOTOGRAPH.bytes(path))
    except (BadFile, ImageError) as error:
        raise UserError(
            f"Expected the photograph {path} of scikit-image, got: {error}. "
            "Install scikit-image again, from its wheel."
        ) from error


def _crop(name: str, box: tuple[int, int, int, int]) -> Image.Image:
    return photograph(name).crop(box)


# pictures with flat regions ----------------------------------------------------------------------


def _flat_makers() -> dict[str, Maker]:
    """What makes each picture, by its name: "letterboxed/coffee_wide" and so on."""
    makers: dict[str, Maker] = {}
    for number, name in enumerate(PHOTOGRAPHS):
        shape = "tall" if number % 3 == 2 else "wide"
        colour = WHITE if number == 4 else BLACK
        makers[f"letterboxed/{name}_{shape}"] = partial(_letterboxed, name, shape, colour)
        side = ("left", "right", "top", "bottom")[number % 4]
        makers[f"half_blurred/{name}_{side}"] = partial(_half_blurred, name, side)
        exposure = "shadows" if number % 2 else "light"
        makers[f"saturated/{name}_{exposure}"] = partial(_saturated, name, exposure)
    makers |= {f"drawing/{name}": partial(_drawing, name) for name in DRAWINGS}
    drawn = {"chart": _chart, "shapes": _shapes, "circuit": _circuit}
    return makers | {f"drawing/{name}": partial(_drawn, draw) for name, draw in drawn.items()}


def _part(name: str, shape: tuple[int, int]) -> Image.Image:
    """The largest central part of a photograph with this shape, resized to it."""
    picture = photograph(name)
    scale = min(picture.width / shape[0], picture.height / shape[1])
    width, height = scale * shape[0], scale * shape[1]
    left, top = (picture.width - width) / 2, (picture.height - height) / 2
    box = (left, top, left + width, top + height)
    return picture.resize(shape, Image.Resampling.BICUBIC, box=box)


def _centred(picture: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """The picture in the middle of a square of this colour."""
    square = Image.new("RGB", (SIDE, SIDE), colour)
    square.paste(picture, ((SIDE - picture.width) // 2, (SIDE - picture.height) // 2))
    return square


def _letterboxed(name: str, shape: str, colour: tuple[int, ...]) -> Image.Image:
    """A wide or tall part of a photograph between two bars."""
    narrow = SIDE - 2 * BAR
    return _centred(_part(name, (SIDE, narrow) if shape == "wide" else (narrow, SIDE)), colour)


def _half_blurred(name: str, side: str) -> Image.Image:
    """A photograph with the half of this side out of focus."""
    picture, half = _part(name, (SIDE, SIDE)), SIDE // 2
    left, top = half * (side == "right"), half * (side == "bottom")
    right = half if side == "left" else SIDE
    bottom = half if side == "top" else SIDE
    blurred = picture.filter(ImageFilter.GaussianBlur(BLUR))
    picture.paste(blurred.crop((left, top, right, bottom)), (left, top))
    return picture


def _saturated(name: str, exposure: str) -> Image.Image:
    """A photograph of 2.5 times its light, or without its darker half."""
    bright, dark = (lambda value: min(255, value * 5 // 2)), (lambda value: max(0, 2 * value - 255))
    change = bright if exposure == "light" else dark
    return _part(name, (SIDE, SIDE)).point([change(value) for value in range(256)] * 3)


def _drawing(name: str) -> Image.Image:
    """One of scikit-image's drawings on a white square; the phantom is black as X-rays are."""
    drawn = photograph(name).copy()
    drawn.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC)
    return _centred(drawn, BLACK if name == "phantom" else WHITE)


def _drawn(draw: Callable[[ImageDraw.ImageDraw, int], None]) -> Image.Image:
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
        box = (left, (14 - height) * unit, left + 3 * unit // 2, 14 * unit)
        draw.rectangle(box, colours[number])
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
        at, down = (2 + 3 * number) * unit, (15 - number) * unit
        draw.line((at, unit, at, down, side - unit, down), "black", 6)
        disc = (at - unit // 3, 4 * unit, at + unit // 3, 14 * unit // 3)
        draw.ellipse(disc, "white", "black", 6)
