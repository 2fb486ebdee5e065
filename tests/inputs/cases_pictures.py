"""Bad inputs that are images, zips of them, and tables of their labels."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from tests.inputs.case import Case
from tests.inputs.cases_files import ATTACK, file_case
from tests.inputs.damage import text


def all_cases() -> Iterator[Case]:
    """Every case of this file."""
    yield from pictures()
    yield from tables()
    yield from folders()


def pictures() -> Iterator[Case]:
    """Images in every format that Pillow writes, damaged; and containers that lie."""
    fit = ("fit-prior", "--images", "images", "--patch", "8", "--size", "256", "--out", "p")
    commands = (ATTACK, (*fit[:-1], "p.safetensors"), ("sample", "--from", "images", "--out", "o"))
    for argv in commands:
        for title, content in picture_files().items():
            name = f"images/9.{title.split()[0].lower()}"
            yield file_case("data", name, argv, title, text(content))


FORMATS = {
    **{"PNG": "png", "JPEG": "jpg", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "WEBP": "webp"},
    **{"PPM": "ppm", "DDS": "dds", "ICO": "ico", "JPEG2000": "jp2", "TGA": "tga", "PCX": "pcx"},
    **{"SGI": "sgi", "ICNS": "icns", "MPO": "mpo", "AVIF": "avif"},
}
"""What Pillow writes, by its name, and the ending of such a file."""

PNG = b"\x89PNG\r\n\x1a\n"


@cache
def picture_files() -> dict[str, bytes | Callable[[], bytes]]:
    """Damaged files by format: cut off, with other bytes, or saying that they are enormous."""
    from PIL import Image

    files: dict[str, bytes | Callable[[], bytes]] = {}
    picture = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    for kind, suffix in FORMATS.items():
        buffer = io.BytesIO()
        try:
            picture.save(buffer, kind)
        except Exception:  # a format that this Pillow was built without
            continue
        whole, chance = buffer.getvalue(), random.Random(kind)
        files[f"{suffix} cut"] = whole[: len(whole) // 2]
        files[f"{suffix} start only"] = whole[:20]
        for seed in range(4):
            damaged = bytearray(whole)
            for _ in range(6):
                damaged[chance.randrange(min(len(damaged), 200))] = chance.randrange(256)
            files[f"{suffix} bytes {seed}"] = bytes(damaged)
    files["png of 2^62 pixels"] = PNG + _size(2**31 - 1)
    files["png bomb"] = lambda: PNG + _size(20_000) + _chunk(b"IDAT", _zeros(20_000))
    files["svg text"] = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    files["eps program"] = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\nquit\n"
    files["png of no bytes"] = b""
    return files


def _size(side: int) -> bytes:
    """The part of a PNG that says how large it is."""
    return _chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))


def _zeros(side: int) -> bytes:
    """A tenth of the rows of a black picture, compressed."""
    return zlib.compress(b"\0" * ((3 * side + 1) * side // 10), 9)


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def tables() -> Iterator[Case]:
    """Label files."""
    commands = (
        ATTACK,
        ("sample", "--from", "images", "--out", "out"),
        (*ATTACK, "--labels", "images/labels.csv"),
    )
    for argv in commands:
        for title, content in LABELS.items():
            yield file_case("data", "images/labels.csv", argv, f"labels: {title}", text(content))


def _rows(*rows: str) -> bytes:
    return ("\n".join(("file,label", *rows)) + "\n").encode()


LABELS: Mapping[str, bytes] = {
    "5,000 digits": _rows("0.png," + "9" * 5000, "1.png,1"),
    "10^30": _rows("0.png," + "1" + "0" * 30, "1.png,1"),
    "-1": _rows("0.png,-1", "1.png,1", "2.png,0", "3.png,0"),
    "1.5": _rows("0.png,1.5", "1.png,1"),
    "nan": _rows("0.png,nan", "1.png,1"),
    "other digits": _rows("0.png,²", "1.png,٣"),
    "empty id": _rows(",1", "1.png,1", "2.png,0", "3.png,0"),
    "empty label": _rows("0.png,", "1.png,1"),
    "a name twice": _rows("0.png,1", "0.png,2", "1.png,0", "2.png,0", "3.png,0"),
    "a column twice": b"file,label,label\n0.png,1,2\n1.png,1,2\n2.png,1,2\n3.png,1,2\n",
    "no header": b"0.png,1\n1.png,2\n",
    "only a header": b"file,label\n",
    "a huge field": b"file,label\n0.png," + b"x" * 1_000_000 + b"\n",
    "an open quote": b'file,label\n"0.png,1\n1.png,2\n',
    "too many cells": _rows("0.png,1,2,3", "1.png,1"),
    "nul": b"file,label\n0.png,\x001\n",
    "not UTF-8": b"file,label\n\xff\xfe.png,1\n",
    "UTF-16": "file,label\n0.png,1\n".encode("utf-16"),
    "escapes": _rows("0.png\x1b[2J,1", "\x1b]0;x\x07.png,2"),
    "strangers": _rows("a.png,1", "b.png,2"),
    "some strangers": _rows("0.png,1", "b.png,2"),
    "other classes": _rows("0.png,99", "1.png,1", "2.png,0", "3.png,0"),
    "2^63": _rows(f"0.png,{2**63}", "1.png,1", "2.png,0", "3.png,0"),
    "10^5 lines": _rows(*(f"{k}.png,{k % 5}" for k in range(100_000))),
    "10^4 columns": ",".join(f"c{k}" for k in range(10_000)).encode() + b"\n",
    "names up": _rows("../0.png,1", "/etc/passwd,2"),
    "json": b'{"0.png": 1}\n',
}


def folders() -> Iterator[Case]:
    """Folders that hold what they should not, and zips that lie."""
    for title, content in zips().items():
        for argv in (
            ("attack", "experiment.yaml", "--images", "images.zip", "--out", "out"),
            ("sample", "--from", "images.zip", "--out", "out"),
        ):
            yield file_case("data", "images.zip", argv, f"zip: {title}", text(content))
    strangers = {
        "a\x1b[2Jb.png": b"x",
        "[a](b).png": b"x",
        "<b>.png": b"x",
        "x" * 250 + ".png": b"",
    }
    for title, content in strangers.items():
        for argv in (ATTACK, ("sample", "--from", "images", "--out", "out")):
            damage = text(content)
            name = f"images/{title}"
            yield file_case("data", name, argv, "no image", damage)


@cache
def zips() -> dict[str, bytes | Callable[[], bytes]]:
    """Zips whose entries are outside, twice there, encrypted, bombs or cut off."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((32, 32)).save(buffer, "PNG")
    png = buffer.getvalue()
    sound = packed(("0.png", png), ("1.png", png), ("2.png", png))
    return {
        "outside": packed(("../../0.png", png), ("/etc/0.png", png)),
        "twice": packed(("0.png", png), ("0.png", png)),
        "bomb": lambda: packed(("0.png", b"\0" * (300 << 20)), ("1.png", png)),
        "lying": patched(sound, struct.pack("<I", 2**32 - 2), central=24),
        "encrypted": patched(sound, b"\1", central=8, local=6),
        "unknown method": patched(sound, b"\x63", central=10, local=8),
        "cut": sound[:-30],
        "cut entry": sound[:60] + sound[90:],
        "no entries": packed(),
        "a zip in a zip": packed(("a.zip", sound)),
        "10^5 entries": lambda: packed(*((f"{k}.txt", b"") for k in range(100_000))),
        "stored": packed(("0.png", png[:50]), method=zipfile.ZIP_STORED),
        "escapes": packed(("a\x1b[2Jb.png", b"x"), ("1.png", png)),
    }


def packed(*entries: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip of these entries."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as archive:
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def patched(content: bytes, value: bytes, *, central: int, local: int | None = None) -> bytes:
    """A zip with other bytes in the records of its first entry."""
    changed = bytearray(content)
    for mark, offset in ((b"PK\x01\x02", central), (b"PK\x03\x04", local)):
        if offset is not None:
            at = changed.find(mark) + offset
            changed[at : at + len(value)] = value
    return bytes(changed)
