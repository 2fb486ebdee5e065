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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import one_line

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


class ImageError(UserError):
    """One image cannot be used. `reason` says why; `image_id` is set where it is known."""

    def __init__(self, reason: str, image_id: str = "") -> None:
        super().__init__(reason, image_id)
        self.reason = reason
        self.image_id = image_id

    def __str__(self) -> str:
        return f"{self.image_id}: {self.reason}" if self.image_id else self.reason


class Decoded(NamedTuple):
    """A file's picture, and the EXIF orientation that set it upright; 1 if there is none."""

    picture: Image.Image
    turn: int


def decode_image(content: bytes, *, min_side: int = 1) -> Image.Image:
    """An upright RGB picture with 8 bits per channel. Raises ImageError with the reason.

    min_side  the smallest allowed short side in pixels, one patch of the model that will see it
    """
    return decoded(content, min_side=min_side).picture


def decoded(content: bytes, *, min_side: int = 1, labels: bool = False) -> Decoded:
    """The same, with its orientation.

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
        return Decoded(picture.transpose(_TURN[turn]) if turn in _TURN else picture, turn)


def check_header(content: bytes, *, min_side: int = 1) -> None:
    """Raise ImageError where a file's first bytes show that it is no image of a usable size;
    nothing is decoded, so a file that is damaged further on passes."""
    with _opened(content) as image:
        _check_sides(image.size, min_side)


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """The image as Pillow opens it; whatever its decoders raise becomes an ImageError."""
    if not content:
        raise ImageError("the file is empty (0 bytes)")
    # Importing breaching makes Pillow fill up truncated files with grey, in the whole process.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings():
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


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ImageError("floating-point pixels have no fixed range: save the image with 8 bits")
    if image.mode.startswith("I"):
        # PNG and PPM reach mode I with 16 bits, TIFF with 32
        if image.mode == "I" and image.format not in {"PNG", "PPM"}:
            raise ImageError(
                "signed and 32-bit integer pixels have no fixed range: save the image with 8 bits"
            )
        tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
        most = 2 ** tags.get(BITSPERSAMPLE, (16,))[0] - 1
        levels = np.asarray(image).astype(np.uint32)
        clear = levels == image.info.get("transparency")
        if tags.get(PHOTOMETRIC_INTERPRETATION, 1) == 0:  # white is 0
            levels = most - levels
        eight = (levels * 255 + most // 2) // most
        eight[clear] = 255
        return Image.fromarray(eight.astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in {"RGBA", "LA", "PA", "RGBa", "La"}:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")
