"""Every kind of image file, with known pixels, and every reason to refuse one."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps
from PIL.PngImagePlugin import PngImageFile

from mjp_privacy.data import ImageError
from mjp_privacy.data.decoding import decode_image, decoded
from tests.helpers.image_files import noise

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def encode(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def pixels(content: bytes) -> np.ndarray:
    picture = decode_image(content)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def row(picture: Image.Image, kind: str = "PNG", **options: Any) -> list[tuple[int, ...]]:
    """The first row of a file's pixels."""
    return [tuple(pixel) for pixel in pixels(encode(picture, kind, **options))[0].tolist()]


def of_row(mode: str, *values: Any) -> Image.Image:
    picture = Image.new(mode, (len(values), 1))
    picture.putdata(values)
    return picture


def test_grey_one_bit_transparent_and_palette_pixels() -> None:
    assert row(of_row("L", 7, 9)) == [(7,) * 3, (9,) * 3]
    assert row(of_row("1", 0, 1)) == [(0,) * 3, WHITE]
    assert row(of_row("LA", (40, 255), (40, 0))) == [(40,) * 3, WHITE]
    assert row(of_row("RGB", RED, BLUE), transparency=RED) == [WHITE, BLUE]
    colours = of_row("RGBA", (10, 20, 30, 255), (10, 20, 30, 0), (0, 100, 200, 51))
    assert row(colours) == [(10, 20, 30), WHITE, (204, 224, 244)]  # 255 · 0.8 + value · 0.2
    palette = of_row("P", 0, 1)
    palette.putpalette([*RED, *BLUE])
    assert row(palette) == [RED, BLUE]
    for kind in ("PNG", "GIF"):
        assert row(palette, kind, transparency=0) == [WHITE, BLUE]
    assert row(palette, transparency=b"\x80\xff") == [(255, 127, 127), BLUE]
    for kind in ("TIFF", "JPEG"):
        cmyk = pixels(encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), kind))
        assert np.abs(cmyk.astype(int) - np.array(RED)).max() <= 2


def test_16_bit_grey_is_scaled_not_clipped_in_both_byte_orders() -> None:
    eight = np.arange(256, dtype=np.uint16).reshape(16, 16)
    for kind in ("PNG", "TIFF"):
        assert np.array_equal(pixels(encode(Image.fromarray(eight * 257), kind))[..., 0], eight)
    levels = np.array([[0, 128, 129, 257, 30000, 65535]], dtype=">u2")
    found = pixels(b"P5 6 1 65535\n" + levels.tobytes())[..., 0]
    assert np.array_equal(found, np.round(levels.astype(float) / 257))


def tiff(data: bytes, width: int, bits: int, photometric: int = 1, signed: bool = False) -> bytes:
    """An uncompressed grey TIFF of one row, which Pillow does not write itself."""
    tags = {256: width, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1}
    tags |= {279: len(data), 339: 1 + signed}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data += bytes(len(data) % 2)
    start = struct.pack("<2sHI", b"II", 42, 8 + len(data))
    return start + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_grey_of_12_bits_negatives_and_transparent_levels() -> None:
    levels = np.array([0, 30000, 65535], dtype="<u2").tobytes()
    assert pixels(tiff(levels, 3, 16))[0, :, 0].tolist() == [0, 117, 255]
    assert pixels(tiff(levels, 3, 16, photometric=0))[0, :, 0].tolist() == [255, 138, 0]
    packed = bytes([0x00, 0x08, 0x00, 0xFF, 0xF0, 0x00])  # 0, 2048, 4095, 0
    assert pixels(tiff(packed, 4, 12))[0, :, 0].tolist() == [0, 128, 255, 0]
    png = encode(Image.fromarray(np.array([[300, 30000, 0]], dtype=np.uint16)))
    body = b"tRNS" + struct.pack(">H", 300)
    chunk = struct.pack(">I", 2) + body + struct.pack(">I", zlib.crc32(body))
    at = png.index(b"IDAT") - 4
    assert pixels(png[:at] + chunk + png[at:])[0, :, 0].tolist() == [255, 117, 0]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_and_told(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(noise(6, 4), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    found, turn = decoded(content)
    assert np.array_equal(np.asarray(found), np.asarray(upright.convert("RGB")))
    assert turn == (1 if kind == "TIFF" else orientation)  # Pillow has turned it by itself
    grey = encode(noise(6, 4).getchannel(0), "PNG", exif=exif)
    numbers, turn = decoded(grey, labels=True)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(grey)))
    assert (np.array(numbers).tolist(), turn) == (np.asarray(upright).tolist(), orientation)
    for nonsense in (b"nonsense", b"MM\x00*", b"MM|*\x00\x00\x00\x08\x00"):
        content = encode(noise(), "PNG", exif=b"Exif\x00\x00" + nonsense)
        assert pixels(content).shape == (8, 12, 3)


# refusals -----------------------------------------------------------------------------------------


def reason(content: bytes, **options: Any) -> str:
    with pytest.raises(ImageError) as caught:
        decoded(content, **options)
    assert "\n" not in caught.value.reason
    return caught.value.reason


def damaged() -> bytes:
    content = bytearray(encode(noise()))
    content[content.index(b"IDAT") + 12] ^= 0xFF
    return bytes(content)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF"
RGB16 = Image.new("RGB", (16, 16), "red")
REFUSED: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "nothing": (b"", {}, "0 bytes"),
    "text": (b"not an image", {}, "Pillow"),
    "checksum": (damaged(), {}, "decoded"),
    "float": (encode(Image.new("F", (4, 4), 0.5), "TIFF"), {}, "8 bits"),
    "32 bits": (encode(Image.new("I", (4, 4), 70000), "TIFF"), {}, "8 bits"),
    "signed": (tiff(bytes(2 * 4), 4, 16, signed=True), {}, "signed"),
    "narrow": (encode(Image.new("L", (500, 4))), {}, "500×4"),
    "PostScript": (POSTSCRIPT, {}, "Pillow"),  # a program
    "too small for a patch": (encode(noise(40, 15)), {"min_side": 16}, "15 px"),
    "no map of labels": (encode(noise()), {"labels": True}, "RGB"),
    **{kind: (encode(RGB16, kind), {}, "Pillow") for kind in ("DDS", "TGA", "ICO", "PCX", "SGI")},
}
"""Only formats of photographs are opened: a texture once took a whole folder with it."""


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_refused_says_why(kind: str) -> None:
    content, options, said = REFUSED[kind]
    assert said in reason(content, **options)


def test_limits_of_pillow_that_another_library_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that announces 10^10 pixels, and files of which one half is missing."""
    bomb = b"P6 100000 100000 255\n" + bytes(100)
    assert "too many pixels" in reason(bomb)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as breaching does
    assert "too many pixels" in reason(bomb)
    for kind in ("PNG", "JPEG", "WEBP", "BMP"):
        content = encode(noise(64, 64), kind)
        assert reason(content[: len(content) // 2])


class PanicException(BaseException):
    """As a library in Rust raises it."""


RAISED = (RecursionError("too deep"), AssertionError(), PanicException(), MemoryError())


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_decoder_raises_is_a_reason(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(PngImageFile, "load", fail)
    assert ("memory" in reason(encode(noise()))) == isinstance(error, MemoryError)
