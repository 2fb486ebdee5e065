"""The files of a folder or zip by their relative names. A zip is read in place, not extracted."""

from __future__ import annotations

import lzma
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import nearest
from mjp_privacy.data.decoding import ImageError

_SUFFIX_WORDS = """
    .jpg .jpeg .jpe .jfif .png .bmp .gif .tif .tiff .webp .ppm .pgm .pbm .pnm
    .jp2 .j2k .avif .heic .heif
"""
IMAGE_SUFFIXES = frozenset(_SUFFIX_WORDS.split())
"""Endings of image files, in upper or lower case. What Pillow cannot read is reported later."""

MAX_BYTES = 512 * 2**20
"""Size of the largest image file that is read into memory."""

_ZIP_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    OSError,
    EOFError,
    NotImplementedError,
)


class Files(Protocol):
    """A set of files that are read by name."""

    @property
    def path(self) -> Path:
        """The folder or zip itself."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files: relative posix paths, sorted."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a file; ImageError with the reason if it cannot be read."""
        ...


class FolderFiles:
    """All files under a folder, also behind links; hidden files and folders are left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.names = tuple(sorted(_walk(path, "", frozenset())))
        except OSError as error:
            raise UserError(
                f"Cannot list {error.filename}: {error.strerror}. Make it readable, or take it out."
            ) from error

    def read(self, name: str) -> bytes:
        """The content of a file; ImageError if it is too large or cannot be read."""
        path = self.path / name
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ImageError(f"the file is larger than {MAX_BYTES >> 20} MiB")
            return path.read_bytes()
        except OSError as error:
            raise ImageError(f"cannot be read ({error.strerror})") from error


class ZipFiles:
    """The entries of a zip. Each process opens its own handle: it can be pickled and forked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: tuple[int, zipfile.ZipFile] | None = None
        try:
            entries = [info for info in self._archive.infolist() if not info.is_dir()]
        except (zipfile.BadZipFile, OSError) as error:
            raise UserError(
                f"{path} is not a readable zip ({error}). Make or copy it again."
            ) from error
        for info in entries:
            _refuse_unsafe(path, info)
        kept = {info.filename for info in entries if not _is_hidden(info.filename)}
        self.names = tuple(sorted(kept))

    @property
    def _archive(self) -> zipfile.ZipFile:
        if self._handle is None or self._handle[0] != os.getpid():
            self._handle = (os.getpid(), zipfile.ZipFile(self.path))
        return self._handle[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_handle": None}

    def read(self, name: str) -> bytes:
        """The content of an entry; ImageError if it is too large or damaged."""
        try:
            if self._archive.getinfo(name).file_size > MAX_BYTES:
                raise ImageError(f"the file is larger than {MAX_BYTES >> 20} MiB")
            return self._archive.read(name)
        except _ZIP_DAMAGE as error:
            raise ImageError(f"damaged inside the zip ({error})") from error


def open_files(path: Path) -> Files:
    """The folder or zip at `path`; UserError if it is neither or holds names that are not UTF-8."""
    files: Files
    if path.is_dir():
        files = FolderFiles(path)
    elif path.is_file() and (path.suffix.lower() == ".zip" or zipfile.is_zipfile(path)):
        files = ZipFiles(path)
    elif path.exists():
        raise UserError(
            f"Expected a folder or a zip of images, got the file {path}. Give the folder it lies "
            "in; unpack any other archive, or zip it."
        )
    else:
        raise missing_path("folder or zip of images", path)
    _refuse_unusable_names(files)
    return files


def image_names(files: Files) -> tuple[str, ...]:
    """Names with an image's ending, sorted; UserError if there are none."""
    names = tuple(name for name in files.names if _suffix(name) in IMAGE_SUFFIXES)
    if not names:
        kinds = Counter(_suffix(name) or "no ending" for name in files.names).most_common(5)
        contents = ", ".join(f"{count} × {kind}" for kind, count in kinds) or "nothing at all"
        raise UserError(
            f"No image in {files.path}: expected files such as .jpg, .png or .webp at any depth, "
            f"found {contents}. Give the folder that holds the images."
        )
    return names


def missing_path(kind: str, path: Path) -> UserError:
    """The error for a path that does not exist; it suggests the most similar one that does."""
    absent, parent, rest = path, path.absolute().parent, Path()
    while not parent.is_dir():
        absent, parent, rest = parent, parent.parent, absent.name / rest
    names = [entry.name for entry in parent.iterdir()] if os.access(parent, os.R_OK) else []
    near = nearest(absent.name, names)
    if near is None:
        return UserError(f"No {kind} at {path}: {parent} has no entry {absent.name!r} or similar.")
    whole = parent / near / rest
    return UserError(
        f"No {kind} at {path}. Did you mean {whole if whole.exists() else parent / near}?"
    )


def _walk(folder: Path, prefix: str, above: frozenset[Path]) -> Iterator[str]:
    """Names under `folder`. `above`: the folders that contain it, so that a loop of links ends."""
    real = folder.resolve()
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if _is_hidden(entry.name):
                continue
            if entry.is_dir():
                yield from _walk(folder / entry.name, name + "/", above | {real})
            elif entry.is_file() or entry.is_symlink():
                yield name


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _refuse_unsafe(path: Path, info: zipfile.ZipInfo) -> None:
    name = info.filename
    if name.startswith("/") or "\\" in name or re.match(r"[A-Za-z]:", name):
        fault = "an absolute path or a backslash"
    elif ".." in name.split("/"):
        fault = "'..'"
    elif info.flag_bits & 0x1:
        fault = "encrypted content"
    else:
        return
    raise UserError(
        f"{path} holds an entry with {fault}: {name!r}. Expected plain relative names and no "
        "password; make the zip again from the folder of images."
    )


def _refuse_unusable_names(files: Files) -> None:
    """Names that are not Unicode cannot become image ids, since tables and CSVs are UTF-8."""
    for name in files.names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{files.path} holds a file name that is not UTF-8: {name!r}. Rename it."
            ) from error
