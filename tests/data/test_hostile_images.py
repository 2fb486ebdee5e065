"""Images and folders from strangers: whatever one file holds or is, its neighbours are read."""

from __future__ import annotations

import io
import logging
import os
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError, decoding, files, load_images, open_images
from mjp_privacy.data.decoding import decode_image
from mjp_privacy.data.files import LONGEST, named_by_id
from tests.helpers.image_files import make_images, zipped


def read_all(path: Path) -> dict[str, str]:
    """What became of every image: its size, or the reason why it has none."""
    source = open_images(path)
    outcome = {}
    for record in source.records:
        try:
            outcome[record.image_id] = str(source.decode(record).size)
        except ImageError as error:
            outcome[record.image_id] = error.reason
    return outcome


# decoders -----------------------------------------------------------------------------------------


class Panic(BaseException):
    """As a library in Rust raises it."""


Panic.__name__ = "PanicException"

RAISED = [
    ZeroDivisionError("division by zero"),
    RecursionError("maximum recursion depth exceeded"),
    struct.error("unpack requires a buffer"),
    AssertionError(),
    AttributeError("no such thing"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    Panic("index out of bounds"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["open", "load"])
def test_whatever_a_decoder_raises_is_one_images_reason(
    error: BaseException, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_images(tmp_path / "in", ["a.png", "b.bmp"])

    def fail(*_: object, **__: object) -> None:
        raise error

    from PIL.BmpImagePlugin import BmpImageFile

    monkeypatch.setattr(BmpImageFile, "_open" if place == "open" else "load", fail)
    outcome = read_all(folder)
    assert outcome["a.png"] == "(8, 8)"
    assert outcome["b.bmp"].startswith(("cannot be decoded", "not an image"))


def test_a_decoder_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    from PIL.PngImagePlugin import PngImageFile

    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    monkeypatch.setattr(PngImageFile, "load", fail)
    with pytest.raises(ImageError, match="needs more memory to be decoded than there is"):
        decode_image(stream.getvalue())


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(stream, kind)
    return stream.getvalue()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF"


@pytest.mark.parametrize("kind", ["DDS", "TGA", "ICO", "PCX", "SGI", "EPS"])
def test_only_formats_of_photographs_are_opened(kind: str, tmp_path: Path) -> None:
    """Such as the texture that once took a whole folder with it, or a program in PostScript."""
    content = POSTSCRIPT if kind == "EPS" else encoded(kind)
    folder = make_images(tmp_path / "in", ["a.png"])
    (folder / "b.png").write_bytes(content)
    assert read_all(folder) == {
        "a.png": "(8, 8)",
        "b.png": "not an image in a format that Pillow can read",
    }


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000"])
def test_every_format_of_the_endings_is_opened(kind: str) -> None:
    assert decode_image(encoded(kind)).size == (16, 16)


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_a_bomb_is_refused_by_its_header() -> None:
    with pytest.raises(ImageError, match="too many pixels"):
        decode_image(png(30_000, 30_000, bytes(1000)))


def test_a_damaged_tiff_says_nothing_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.BytesIO()
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 2, (64, 64), dtype=np.uint8) * 255).convert("1")
    picture.save(stream, "TIFF", compression="group4")
    content = bytearray(stream.getvalue())
    content[20:120] = bytes(100)
    try:
        decode_image(bytes(content))
    except ImageError:
        logging.getLogger(__name__).info("refused")
    os.write(2, b"still open")
    assert capfd.readouterr().err == "still open"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "P"])
def test_large_pictures_are_converted_in_strips(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    shape = {"RGBA": (50, 40, 4), "LA": (50, 40, 2)}.get(mode, (50, 40))
    dtype = np.uint16 if mode == "I;16" else np.uint8
    pixels = rng.integers(0, np.iinfo(dtype).max, shape, dtype=dtype)
    picture = Image.fromarray(pixels) if mode != "P" else Image.fromarray(pixels).convert("P")
    stream = io.BytesIO()
    picture.save(stream, "PNG", **({"transparency": 3} if mode == "P" else {}))
    whole = np.asarray(decode_image(stream.getvalue()))
    monkeypatch.setattr(decoding, "STRIP_PIXELS", 300)
    assert np.array_equal(np.asarray(decode_image(stream.getvalue())), whole)


# what lies in a folder ----------------------------------------------------------------------------


def a_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is a hundred bytes at most
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(before)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a named pipe"),
    "socket": (a_socket, "a socket"),
    "empty folder": (lambda path: path.mkdir(), "a folder"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "no file of this name"),
    "link to itself": (lambda path: path.symlink_to(path), "cannot be read"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "empty device": (lambda path: path.symlink_to("/dev/null"), "a device"),
    "nothing": (lambda path: path.write_bytes(b""), "the file is empty (0 bytes)"),
    "text": (lambda path: path.write_text("<svg>"), "not an image"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_one_images_reason(kind: str, tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", ["a.png"])
    make, expected = ODD[kind]
    make(folder / "b.png")
    outcome = read_all(folder)
    assert outcome["a.png"] == "(8, 8)"
    assert expected in outcome["b.png"]


def test_a_folder_that_is_named_like_an_image_is_a_folder(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "in", ["x.png/a.png", "y.png/b.png"])
    assert read_all(folder) == {"x.png/a.png": "(8, 8)", "y.png/b.png": "(8, 8)"}


def test_links_that_multiply_folders_are_refused(tmp_path: Path) -> None:
    """Forty folders, each with two links to the next: a trillion paths."""
    for number in range(40):
        (tmp_path / "in" / str(number)).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "in" / str(number) / name).symlink_to(f"../../in/{number + 1}")
    (tmp_path / "in" / "40").mkdir()
    with pytest.raises(UserError, match=rf"in more than {files.MOST_WAYS} ways"):
        open_images(tmp_path / "in" / "0")


@pytest.mark.parametrize("path", ["", "  ", "x" * 300, "a\0b"])
def test_a_path_that_is_none(path: str) -> None:
    with pytest.raises(UserError, match=r"folder or.* zip of images"):
        open_images(path)


# names --------------------------------------------------------------------------------------------

NAMES = [
    b"caf\xe9.png",
    b"esc\x1b[2J.png",
    b"line\nbreak.png",
    b"tab\there.png",
    "sep\u2028arator.png".encode(),
    b"A.png",
    b"a.png",
    "\u00e9.png".encode(),
    "e\u0301.png".encode(),
    b"=1+1.png",
    b"[x](http://x.example).png",
    b"$x_{.png",
]


def test_every_name_is_an_image_with_an_id_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    made = 0
    for level, name in enumerate(NAMES):
        try:
            Image.new("L", (8, 8), level).save(folder / os.fsdecode(name), "PNG")
            made += 1
        except OSError:  # a disk that takes UTF-8 names only, or two for one
            continue
    outcome = read_all(folder)
    assert len(outcome) == made
    assert set(outcome.values()) == {"(8, 8)"}
    for image_id in outcome:
        image_id.encode("utf-8")
        assert image_id.isprintable()
    assert {item.image_id for item in load_images(folder, size=8)} == set(outcome)


def test_ids_tell_names_apart_whatever_they_are() -> None:
    names = ["a\x01.png", "a%01.png", "a\x02.png", "x" * 600 + "1.png", "x" * 600 + "2.png"]
    names += ["\udce9.png", "\ud800.png", "k/" + "y" * 300 + ".png", "\u0439" * 200 + ".png"]
    by_id = named_by_id(names)
    assert sorted(by_id.values()) == sorted(names)
    assert by_id["a%01.png"] == "a%01.png"
    for image_id in by_id:
        assert len(image_id) <= LONGEST
        assert all(len(part.encode()) <= 255 for part in image_id.split("/"))
        assert image_id.endswith(".png")
    (escaped,) = (image_id for image_id, name in by_id.items() if name == "a\x01.png")
    again = named_by_id([*names, escaped])  # somebody took the id of another for a name
    assert sorted(again.values()) == sorted([*names, escaped])


# zips ---------------------------------------------------------------------------------------------


def test_a_zip_bomb_is_one_images_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(make_images(tmp_path / "in", ["a.png"]))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b.png", bytes(1 << 20))
        archive.writestr("c.png", bytes(100))
    assert "a zip bomb" not in read_all(path)["b.png"]
    monkeypatch.setattr(files, "BOMB_FROM", 1 << 16)
    outcome = read_all(path)
    assert outcome["a.png"] == "(8, 8)"
    assert outcome["b.png"] == "a zip bomb: 0.0 MiB would become 1.0 MiB"
    assert "a zip bomb" not in outcome["c.png"]


def test_a_name_that_is_twice_in_a_zip_is_no_image(tmp_path: Path) -> None:
    path = zipped(make_images(tmp_path / "in", ["a.png", "b.png"]))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("b.png", archive.read("a.png"))
    assert read_all(path) == {
        "a.png": "(8, 8)",
        "b.png": "two entries of the zip have this name",
    }


def test_a_zip_in_a_zip_is_no_image(tmp_path: Path) -> None:
    path = zipped(make_images(tmp_path / "in", ["a.png"]))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("b.png", path.read_bytes())
        archive.writestr("c.zip", path.read_bytes())
        archive.writestr("esc\x1b[2J.png", archive.read("a.png"))
    outcome = read_all(path)
    assert outcome.pop("b.png") == "not an image in a format that Pillow can read"
    assert outcome.pop("a.png") == "(8, 8)"
    ((image_id, size),) = outcome.items()
    assert (size, image_id.isprintable()) == ("(8, 8)", True)


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    """The entries of a bomb of one kernel share its bytes, so their sizes exceed the file's."""
    path = zipped(make_images(tmp_path / "in", ["a.png", "b.png"]))
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02") + 20
    content[at : at + 4] = struct.pack("<I", 1 << 24)
    path.write_bytes(content)
    with pytest.raises(UserError, match="entries that overlap, as in a zip bomb"):
        open_images(path)


def test_a_name_in_a_zip_that_is_no_utf8(tmp_path: Path) -> None:
    path = zipped(make_images(tmp_path / "in", ["a.png", "bé.png"]))
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    with pytest.raises(UserError, match="expected a readable zip of images; got what cannot be"):
        open_images(path)
