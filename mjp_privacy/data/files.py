"""The files of a folder or zip by their relative names, which are the ids of images."""

from __future__ import annotations

import os
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import MIB, FileKind, reason
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import MAX_BYTES, ImageError

EMBEDDED = "embedded"  # in place of a path: pictures that come along
LONGEST = 512
"""Characters of an image's id."""
LONGEST_PART = 255
"""Bytes between two slashes: so much is the name of a file on nearly every disk."""
UNUSABLE = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories: control characters, bytes that are no Unicode, ends of lines."""


def is_usable(name: str) -> bool:
    """Whether a file's name can be an image's id: text that every table, file name and terminal can
    hold."""
    lengths = (len(part.encode("utf-8", "replace")) for part in name.split("/"))
    if len(name) > LONGEST or max(lengths) > LONGEST_PART:
        return False
    return name.isprintable() or all(unicodedata.category(x) not in UNUSABLE for x in name)


# ------------------------------------------------------------------------------------------------
# Folders and zips.

_SUFFIX_WORDS = """
    .jpg .jpeg .jpe .jfif .png .bmp .gif .tif .tiff .webp .ppm .pgm .pbm .pnm
    .jp2 .j2k .avif .heic .heif
"""
IMAGE_SUFFIXES = frozenset(_SUFFIX_WORDS.split())
"""Endings of image files, in upper or lower case. What Pillow cannot read is reported later."""
IMAGE_FILE = FileKind("an image file", "Replace it, or take it out.", MAX_BYTES)
ZIP = FileKind("a readable zip of images", "Make or copy it again.", 1 << 44)
ENCRYPTED = 1  # of the flags of an entry
BOMB_FROM = 16 * MIB
"""Bytes from which an entry may hold at most BOMB_RATIO times its compressed size."""
BOMB_RATIO = 200
"""Photographs hardly shrink; what a zip can shrink a thousandfold is no photograph."""


class Files(Protocol):
    """A set of files that are read by name."""

    @property
    def path(self) -> Path:
        """The folder or zip itself."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files: relative posix paths, sorted."""

    def read(self, name: str) -> bytes:
        """The content of a file; ImageError with the reason if it cannot be read."""


class ZipFiles:
    """The entries of a zip, read in place: nothing is extracted, and no entry is read unbounded.

    Each process opens its own handle: it can be pickled and forked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: tuple[int, zipfile.ZipFile] | None = None
        size = ZIP.check(path)
        with ZIP.reading(path):
            entries = [info for info in self._archive.infolist() if not info.is_dir()]
        for name in (info.filename for info in entries):
            absolute = name.startswith("/") or "\\" in name or re.match(r"[A-Za-z]:", name)
            if absolute or ".." in name.split("/"):
                raise UserError(
                    f"{shown(path)} holds the entry {shown(repr(name))}: expected relative names "
                    "without '..' and backslashes. Make it again from the folder of images."
                )
        if entries and all(info.flag_bits & ENCRYPTED for info in entries):
            raise ZIP.refusal(path, "one with encrypted content, and no password can be given")
        if sum(info.compress_size for info in entries) > size:
            raise ZIP.refusal(path, "entries that overlap, as in a zip bomb")
        counts = Counter(info.filename for info in entries if not is_hidden(info.filename))
        self._twice = frozenset(name for name, count in counts.items() if count > 1)
        self.names = tuple(sorted(counts))

    @property
    def _archive(self) -> zipfile.ZipFile:
        if self._handle is None or self._handle[0] != os.getpid():
            self._handle = (os.getpid(), zipfile.ZipFile(self.path))
        return self._handle[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_handle": None}

    def read(self, name: str) -> bytes:
        """The content of an entry; ImageError if it is too large, damaged or a zip bomb."""
        if name in self._twice:
            raise ImageError("two entries of the zip have this name")
        try:
            info = self._archive.getinfo(name)
            packed, whole = info.compress_size, info.file_size
            if info.flag_bits & ENCRYPTED:
                raise ImageError("encrypted inside the zip; make the zip again without a password")
            if whole > MAX_BYTES:
                raise ImageError(f"the file is larger than {MAX_BYTES >> 20} MiB")
            if whole > max(BOMB_FROM, BOMB_RATIO * packed):
                sizes = f"{packed / MIB:,.1f} MiB would become {whole / MIB:,.1f} MiB"
                raise ImageError(f"a zip bomb: {sizes}")
            return self._archive.read(info)
        except ImageError:
            raise
        except Exception as error:
            where = f"damaged inside the zip {shown(self.path.name)}"
            raise ImageError(f"{where} ({reason(error)})") from error


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder above it, is one that file managers hide."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


class FolderFiles:
    """All files under a folder, also behind links and pipes; what is hidden is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.names = tuple(sorted(_walk(path)))
        except OSError as error:
            raise UserError(
                f"Cannot list {shown(error.filename)}: {error.strerror}. Make it readable, or take "
                "it out."
            ) from error

    def read(self, name: str) -> bytes:
        """The content of a file; ImageError if it is too large, no file or cannot be read."""
        try:
            return IMAGE_FILE.bytes(self.path / name)
        except BadFile as error:
            raise ImageError(f"cannot be read ({error.got})") from error


def _walk(root: Path) -> Iterator[str]:
    """Names of all under `root` that is no folder, and of empty folders that are named like images.
    A folder that links lead to as well is listed once."""

    def fail(error: OSError) -> None:
        raise error

    met = {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        if not folders and not names and _suffix(folder) in IMAGE_SUFFIXES:
            yield os.path.relpath(folder, root)
        kept = []
        for name in sorted(name for name in folders if not is_hidden(name)):
            if (real := os.path.realpath(os.path.join(folder, name))) not in met:  # noqa: PTH118
                met.add(real)
                kept.append(name)
        folders[:] = kept
        for name in names:
            if not is_hidden(name):
                yield os.path.relpath(os.path.join(folder, name), root)  # noqa: PTH118


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def image_names(files: Files) -> tuple[str, ...]:
    """Names with an image's ending, sorted; UserError if there are none."""
    names = tuple(name for name in files.names if _suffix(name) in IMAGE_SUFFIXES)
    if not names:
        kinds = Counter(_suffix(name) or "no ending" for name in files.names).most_common(5)
        contents = ", ".join(f"{count} × {kind}" for kind, count in kinds) or "nothing at all"
        raise UserError(
            f"No image in {shown(files.path)}: expected files such as .jpg, .png or .webp at any "
            f"depth, found {shown(contents)}. Give the folder that holds the images."
        )
    return names


# ------------------------------------------------------------------------------------------------
# Places.


def open_files(path: Path) -> Files:
    """The folder or zip at `path`; UserError if it is neither, or holds images whose names cannot
    be their ids."""
    files: Files = FolderFiles(path) if place_of(path) == "folder" else ZipFiles(path)
    odd = (name for name in files.names if _suffix(name) in IMAGE_SUFFIXES and not is_usable(name))
    if (name := next(odd, None)) is not None:
        raise UserError(
            f"{shown(path)} holds {shown(repr(name), 200)}: expected names of images of at most "
            f"{LONGEST} characters, without control characters. Rename it."
        )
    return files


def place_of(path: Path) -> Literal["folder", "zip"]:
    """Which of the two is at `path`; UserError if neither is. No image is read."""
    try:
        if path.is_dir():
            return "folder"
        if path.is_file() and (path.suffix.lower() == ".zip" or zipfile.is_zipfile(path)):
            return "zip"
        got = f"the file {shown(path)}" if path.exists() else None
    except (OSError, ValueError) as error:  # a name that is too long, or not ours to read
        got = f"{shown(path)}: {reason(error)}"
    if got is None:
        raise UserError(f"No folder or zip of images at {shown(path)}. Give one that is there.")
    raise UserError(
        f"Expected a folder or a zip of images, got {got}. Give the folder it lies in; unpack any "
        "other archive, or zip it."
    )


def from_home(path: str | Path) -> Path:
    """The path with ~ expanded; unchanged if there is no home folder to put in its place."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
