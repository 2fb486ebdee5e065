"""Every kind of image file, with known pixels, and every reason to refuse one."""

import io
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError
from mjp_privacy.data.decoding import decode_image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encode(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def noise(width: int = 12, height: int = 8) -> Image.Image:
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels(content: bytes) -> np.ndarray:
    picture = decode_image(content)
    assert picture.mode == "RGB"
    return np.asarray(picture)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "TIFF"])
def test_rgb_is_bit_exact(kind: str) -> None:
    assert np.array_equal(pixels(encode(noise(), kind)), np.asarray(noise()))


def test_jpeg_is_what_pillow_reads() -> None:
    content = encode(noise(), "JPEG")
    assert np.array_equal(pixels(content), np.asarray(Image.open(io.BytesIO(content))))


def test_grey_is_repeated() -> None:
    grey = np.arange(96, dtype=np.uint8).reshape(8, 12)
    expected = np.repeat(grey[..., None], 3, axis=2)
    assert np.array_equal(pixels(encode(Image.fromarray(grey))), expected)


def test_one_bit() -> None:
    bits = Image.new("1", (4, 2), 1)
    bits.putpixel((0, 0), 0)
    assert pixels(encode(bits))[0, :2].tolist() == [[0, 0, 0], [255, 255, 255]]


def palette_picture() -> Image.Image:
    """Left half colour 0 (red), right half colour 1 (blue)."""
    picture = Image.new("P", (4, 2), 0)
    picture.putpalette([*RED, *BLUE])
    picture.paste(1, (2, 0, 4, 2))
    return picture


def test_palette() -> None:
    row = pixels(encode(palette_picture()))[0]
    assert [tuple(pixel) for pixel in row] == [RED, RED, BLUE, BLUE]


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_transparent_palette_colour_becomes_white(kind: str) -> None:
    row = pixels(encode(palette_picture(), kind, transparency=0))[0]
    assert [tuple(pixel) for pixel in row] == [WHITE, WHITE, BLUE, BLUE]


def test_palette_with_alpha_values() -> None:
    row = pixels(encode(palette_picture(), "PNG", transparency=b"\x80\xff"))[0]
    assert tuple(row[0]) == (255, 127, 127)
    assert tuple(row[3]) == BLUE


def test_alpha_is_composited_over_white() -> None:
    picture = Image.new("RGBA", (3, 1), (10, 20, 30, 255))
    picture.putpixel((1, 0), (10, 20, 30, 0))
    picture.putpixel((2, 0), (0, 100, 200, 51))
    row = pixels(encode(picture))[0].tolist()
    assert row[:2] == [[10, 20, 30], [255, 255, 255]]
    assert row[2] == [204, 224, 244]  # 255 · 0.8 + value · 0.2


def test_grey_with_alpha_and_transparent_rgb() -> None:
    grey = Image.new("LA", (2, 1), (40, 255))
    grey.putpixel((1, 0), (40, 0))
    assert pixels(encode(grey))[0].tolist() == [[40] * 3, [255] * 3]
    colour = Image.new("RGB", (2, 1), RED)
    colour.putpixel((1, 0), GREEN)
    assert pixels(encode(colour, transparency=RED))[0].tolist() == [list(WHITE), list(GREEN)]


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_cmyk(kind: str) -> None:
    picture = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    expected = np.broadcast_to(np.array(RED), (16, 16, 3))
    assert np.abs(pixels(encode(picture, kind)).astype(int) - expected).max() <= 2


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(kind: str) -> None:
    eight = np.arange(256, dtype=np.uint16).reshape(16, 16)
    content = encode(Image.fromarray(eight * 257), kind)
    assert np.array_equal(pixels(content)[..., 0], eight)


def test_16_bit_grey_rounds_and_is_read_in_both_byte_orders() -> None:
    levels = np.array([[0, 128, 129, 257, 30000, 65535]], dtype=">u2")
    expected = np.round(levels.astype(float) / 257)
    assert np.array_equal(pixels(big_endian_tiff(levels))[..., 0], expected)
    pgm = b"P5 6 1 65535\n" + levels.tobytes()
    assert np.array_equal(pixels(pgm)[..., 0], expected)


def big_endian_tiff(levels: np.ndarray) -> bytes:
    """A minimal uncompressed 16-bit grey TIFF in Motorola byte order."""
    height, width = levels.shape
    fields = [
        (256, width), (257, height), (258, 16), (259, 1), (262, 1), (277, 1), (278, height),
    ]  # fmt: skip
    count = len(fields) + 2
    start = 8 + 2 + 12 * count + 4
    entries = [struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in fields]
    entries.insert(5, struct.pack(">HHII", 273, 4, 1, start))
    entries.append(struct.pack(">HHII", 279, 4, 1, levels.nbytes))
    head = b"MM\x00*" + struct.pack(">IH", 8, count)
    return head + b"".join(entries) + struct.pack(">I", 0) + levels.tobytes()


def test_first_frame_of_several() -> None:
    red, blue = Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), BLUE)
    content = encode(red, "GIF", save_all=True, append_images=[blue])
    assert tuple(pixels(content)[0, 0]) == RED


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    upright = np.asarray(noise(6, 4))
    stored = {  # what a camera stores, so that the viewer's operation gives the upright picture
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encode(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif, **options)
    assert np.array_equal(pixels(content), upright)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", [b"nonsense", b"MM\x00*", b"MM|*\x00\x00\x00\x08\x00"])
def test_nonsense_in_exif_is_no_orientation(kind: str, exif: bytes) -> None:
    content = encode(noise(), kind, exif=b"Exif\x00\x00" + exif)
    assert pixels(content).shape == (8, 12, 3)


# refusals -------------------------------------------------------------------------------------


def reason(content: bytes, **options: int) -> str:
    with pytest.raises(ImageError) as caught:
        decode_image(content, **options)
    assert isinstance(caught.value, UserError)
    return caught.value.reason


def test_empty_and_unknown_files() -> None:
    assert reason(b"") == "the file is empty (0 bytes)"
    assert "format that Pillow can read" in reason(b"not an image")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_truncated_files(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a library, as breaching does, made Pillow fill the missing part with grey."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    content = encode(noise(64, 64), kind)
    assert reason(content[: len(content) // 2])


def test_damaged_checksum() -> None:
    content = bytearray(encode(noise()))
    content[content.index(b"IDAT") + 12] ^= 0xFF
    assert reason(bytes(content)).startswith("cannot be decoded: ")


def test_float_and_32_bit_pixels() -> None:
    assert "no fixed range" in reason(encode(Image.new("F", (4, 4), 0.5), "TIFF"))
    assert "no fixed range" in reason(encode(Image.new("I", (4, 4), 70000), "TIFF"))


def test_sides() -> None:
    content = encode(noise(40, 15))
    assert reason(content, min_side=16) == (
        "too small: short side 15 px, at least 16 px are needed"
    )
    assert decode_image(content, min_side=15).size == (40, 15)
    assert "too narrow: 500×4 px" in reason(encode(Image.new("L", (500, 4))))


@pytest.mark.parametrize("limit", [Image.MAX_IMAGE_PIXELS, None])
def test_decompression_bomb(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that announces 10^10 pixels; also where a program lifted Pillow's limit."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    assert "too many pixels" in reason(b"P6 100000 100000 255\n" + bytes(100))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM"]))
def test_damage_never_raises_anything_else(data: st.DataObject, kind: str) -> None:
    content = bytearray(encode(noise(), kind))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    with suppress(ImageError):
        assert decode_image(bytes(content)).mode == "RGB"
