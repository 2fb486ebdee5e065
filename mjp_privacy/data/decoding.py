"""Decode the bytes of an image file to an 8-bit RGB picture, or say why that is not possible.

Each kind of pixel becomes 8-bit RGB by one fixed rule:

    grey, palette, CMYK, 1-bit   Pillow's conversion; embedded colour profiles are not applied
    transparent                  composited over white
    16-bit grey                  round(v / 257), so that 65535 becomes 255; nothing is clipped
    12-bit grey                  the same with 4095
    float, signed, 32-bit        refused, because their range is unknown
    several frames               the first one
    EXIF orientation             applied; an unreadable EXIF block counts as none

Files come from strangers. Only the formats in FORMATS are tried, a picture's size is checked before
its pixels are decoded, and whatever a decoder raises is the ImageError of that one image.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import first_of, one_line, shown

MAX_BYTES = 512 * 2**20
"""Size of the largest image file that is read into memory."""

MAX_PIXELS = 178_956_970
"""Pillow's own limit against decompression bombs; kept here because a program can lift Pillow's."""

MAX_ASPECT = 100
"""Long side over short side. Beyond it, resizing the short side would make the long one huge."""

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "AVIF", "HEIF")
"""What is opened: the formats of the endings in `files.IMAGE_SUFFIXES`, as far as this Pillow reads
them. Its other decoders, such as those of PostScript and of textures, never see a stranger's file.
"""

ANIMATED = ("GIF", "PNG", "WEBP", "AVIF", "TIFF")
NAMED = 3  # files that a remark names

STRIP_PIXELS = 1 << 22
"""Pixels that are converted at once where a conversion needs further memory for each of them."""

_STDERR = Lock()
"""Held by the one thread that has redirected it."""

_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation to the operation that sets the picture upright."""
SIDEWAYS = (5, 6, 7, 8)
"""Orientations that swap width and height."""


class ImageError(UserError):
    """One image cannot be used. `reason` says why; `image_id` is set where it is known."""

    def __init__(self, reason: str, image_id: str = "") -> None:
        super().__init__(reason, image_id)
        self.reason = reason
        self.image_id = image_id

    def __str__(self) -> str:
        return f"{self.image_id}: {self.reason}" if self.image_id else self.reason


@dataclass
class Altered:
    """Names of files whose pictures are not simply what lies in them."""

    turned: set[str] = field(default_factory=set)
    animated: set[str] = field(default_factory=set)

    def note(self, name: str, turn: int, animated: bool) -> None:
        """Remember what `decoded` or `header` found of a file."""
        if turn != 1:
            self.turned.add(name)
        if animated:
            self.animated.add(name)

    @property
    def remark(self) -> str:
        """One line on them; empty where there are none."""
        told = (
            (self.turned, "image file(s) are turned upright, as EXIF says"),
            (self.animated, "file(s) have several frames, of which the first is taken"),
        )
        return "; ".join(
            f"{len(names)} {what} ({first_of([*map(shown, sorted(names))], NAMED)})"
            for names, what in told
            if names
        )


class Decoded(NamedTuple):
    """A file's picture, and what was done to make it one."""

    picture: Image.Image
    turn: int  # the EXIF orientation that was applied; 1 if there is none
    animated: bool  # whether the file has further frames


class Header(NamedTuple):
    """What the first bytes of a file say of the picture that it decodes to."""

    size: tuple[int, int]
    turn: int
    animated: bool


def decode_image(content: bytes) -> Image.Image:
    """An upright RGB picture with 8 bits per channel. Raises ImageError with the reason."""
    return decoded(content).picture


def decoded(content: bytes, *, min_side: int = 1, labels: bool = False) -> Decoded:
    """An upright picture, and how the file differs from it. Raises ImageError with the reason.

    min_side  the smallest allowed short side in pixels, one patch of the model that will see it
    labels    the pixels are a map of labels, 8-bit grey levels or places in a palette, and stay so
    """
    with _opened(content) as image:
        _check_sides(image.size, min_side)
        if labels and image.mode not in ("L", "P"):
            raise ImageError(
                f"a map of labels has one 8-bit number a pixel (grey or palette), not {image.mode}"
            )
        image.load()
        _check_sides(image.size, min_side)  # some formats know their size only now
        turn = _orientation(image)
        picture = image.copy() if labels else _to_rgb(image)
        upright = picture.transpose(_TURN[turn]) if turn in _TURN else picture
        return Decoded(upright, turn, _is_animated(image))


def header(content: bytes, *, min_side: int = 1, behind: bool = False) -> Header:
    """What a file's first bytes say. Raises ImageError where they show that it is no image of a
    usable size; nothing is decoded, so a file that is damaged further on passes.

    min_side  the smallest allowed short side in pixels
    behind    whether a PNG is decoded that may say its orientation behind its pixels
    """
    with _opened(content) as image:
        if image.format == "TIFF" and behind:  # which Pillow turns by itself
            image.load()
        _check_sides(image.size, min_side)
        hidden = image.format == "PNG" and "exif" not in image.info and not behind
        turn = 1 if hidden else _orientation(image)
        width, height = image.size
        size = (height, width) if turn in SIDEWAYS else (width, height)
        return Header(size, turn, _is_animated(image))


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """The image as Pillow opens it; whatever its decoders raise becomes an ImageError."""
    if not content:
        raise ImageError("the file is empty (0 bytes)")
    # Importing breaching makes Pillow fill up truncated files with grey, in the whole process.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    # Libraries of TIFF and AVIF print on stderr themselves.
    talkative = content[:2] in (b"II", b"MM") or content[4:8] == b"ftyp"
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings(), _silent() if talkative else nullcontext():
            warnings.simplefilter("ignore")  # of each odd tag of a damaged file
            with Image.open(io.BytesIO(content), formats=formats) as image:
                yield image
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError("not an image in a format that Pillow can read") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"too many pixels, at most {MAX_PIXELS} are allowed ({error})") from error
    except MemoryError as error:
        raise ImageError("needs more memory to be decoded than there is") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # a panic is of a decoder in Rust
        said = one_line(error, 200) or type(error).__name__  # parts of the file can stand in it
        raise ImageError(f"cannot be decoded: {said}") from error


@contextmanager
def _silent() -> Iterator[None]:
    """Without what a decoder prints of a damaged file: it would stand among the lines of a run."""
    with _STDERR:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)


def _check_sides(size: tuple[int, int], min_side: int) -> None:
    short, long = sorted(size)
    if short * long > MAX_PIXELS:
        raise ImageError(f"too many pixels: {short * long}, at most {MAX_PIXELS} are allowed")
    if short < min_side:
        raise ImageError(f"too small: short side {short} px, at least {min_side} px are needed")
    if long > MAX_ASPECT * short:
        raise ImageError(
            f"too narrow: {size[0]}×{size[1]} px, one side is over {MAX_ASPECT} times the other"
        )


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) to 8; 1 where there is none or it cannot be read."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 1
    return value if value in _TURN else 1


def _is_animated(image: Image.Image) -> bool:
    """Whether a file holds further frames. Previews and depth maps in photographs are none."""
    try:
        return image.format in ANIMATED and bool(getattr(image, "is_animated", False))
    except Exception:  # what follows the first frame is damaged
        return True


def _to_rgb(image: Image.Image) -> Image.Image:
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    most = 2 ** tags.get(BITSPERSAMPLE, (16,))[0] - 1
    negative = tags.get(PHOTOMETRIC_INTERPRETATION, 1) == 0  # white is 0
    clear = image.info.get("transparency")

    def from_16_bit(grey: Image.Image) -> Image.Image:
        levels = np.asarray(grey).astype(np.int64)
        eight = ((most - levels if negative else levels) * 255 + most // 2) // most
        eight[levels == clear] = 255
        return Image.fromarray(eight.astype(np.uint8)).convert("RGB")

    def over_white(strip: Image.Image) -> Image.Image:
        layer = strip.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")

    if image.mode == "F":
        raise ImageError("floating-point pixels have no fixed range: save the image with 8 bits")
    if image.mode.startswith("I"):
        # PNG and PPM reach mode I with 16 bits, TIFF with 32
        if image.mode == "I" and image.format not in {"PNG", "PPM"}:
            raise ImageError(
                "signed and 32-bit integer pixels have no fixed range: save the image with 8 bits"
            )
        return _in_strips(image, from_16_bit)
    if "transparency" in image.info or image.mode in {"RGBA", "LA", "PA", "RGBa", "La"}:
        return _in_strips(image, over_white)
    return image.convert("RGB")


def _in_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """The picture converted some rows at a time, so that what a conversion needs stays small."""
    rows = max(1, STRIP_PIXELS // max(1, image.width))
    if rows >= image.height:
        return convert(image)
    picture = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        picture.paste(convert(strip), (0, top))
    return picture
