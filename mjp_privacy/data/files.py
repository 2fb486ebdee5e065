"""The files of a folder or zip by their ids: relative names, as far as these can be ids."""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.read import FileKind, reason
from mjp_privacy.core.registry import nearest
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import MAX_BYTES, ImageError
from mjp_privacy.data.ids import named_by_id
from mjp_privacy.data.zip_files import ZipFiles, is_hidden

_SUFFIX_WORDS = """
    .jpg .jpeg .jpe .jfif .png .bmp .gif .tif .tiff .webp .ppm .pgm .pbm .pnm
    .jp2 .j2k .avif .heic .heif
"""
IMAGE_SUFFIXES = frozenset(_SUFFIX_WORDS.split())
"""Endings of image files, in upper or lower case. What Pillow cannot read is reported later."""

IMAGE_FILE = FileKind("an image file", "Replace it, or take it out.", MAX_BYTES)

MOST_WAYS = 100
"""Ways to one folder through links: links can multiply a few folders into billions of paths."""


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
    """All files under a folder, also behind links; hidden files and folders are left out.

    Pipes, devices and links that lead nowhere are among them: reading one is that image's error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            by_id = named_by_id(_shown_late(path))
        except OSError as error:
            raise UserError(
                f"Cannot list {shown(error.filename)}: {error.strerror}. Make it readable, or take "
                "it out."
            ) from error
        self.names = tuple(by_id)
        self._paths = {id_: name for id_, name in by_id.items() if id_ != name}

    def read(self, name: str) -> bytes:
        """The content of a file; ImageError if it is too large, no file or cannot be read."""
        try:
            return IMAGE_FILE.bytes(self.path / self._paths.get(name, name))
        except BadFile as error:
            raise ImageError(f"cannot be read ({error.got})") from error


def open_files(path: Path) -> Files:
    """The folder or zip at `path`; UserError if it is neither."""
    return FolderFiles(path) if place_of(path) == "folder" else ZipFiles(path)


def place_of(path: Path) -> Literal["folder", "zip"]:
    """Which of the two is at `path`; UserError if neither is. No image is read."""
    try:
        if path.is_dir():
            return "folder"
        is_zip = path.is_file() and (path.suffix.lower() == ".zip" or zipfile.is_zipfile(path))
        is_something = path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or not ours to read
        raise UserError(
            f"Expected a folder or a zip of images at {shown(path)}; got {reason(error)}. Give "
            "the folder or zip that holds the images."
        ) from error
    if is_zip:
        return "zip"
    if is_something:
        raise UserError(
            f"Expected a folder or a zip of images, got the file {shown(path)}. Give the folder it "
            "lies in; unpack any other archive, or zip it."
        )
    raise missing_path("folder or zip of images", path)


def from_home(path: str | Path) -> Path:
    """The path with ~ expanded; unchanged if there is no home folder to put in its place."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


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


def missing_path(kind: str, path: Path) -> UserError:
    """The error for a path that does not exist; it suggests the most similar one that does."""
    absent, parent, rest = path, path.absolute().parent, Path()
    while not _is_folder(parent):
        absent, parent, rest = parent, parent.parent, absent.name / rest
    names = [entry.name for entry in parent.iterdir()] if os.access(parent, os.R_OK) else []
    near = nearest(absent.name, names)
    if near is None:
        return UserError(
            f"No {kind} at {shown(path)}: {shown(parent)} has no entry {shown(repr(absent.name))} "
            "or similar."
        )
    whole = parent / near / rest
    suggested = whole if whole.exists() else parent / near
    return UserError(f"No {kind} at {shown(path)}. Did you mean {shown(suggested)}?")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _shown_late(root: Path) -> Iterator[str]:
    """The names of `_walk`, counted where that takes long: a network's disk, or a folder such as /
    that was not meant."""
    from mjp_privacy.core.progress import Progress  # rich: only where files are listed

    with Progress(f"files under {shown(root)}", None) as bar:
        for name in _walk(root):
            bar.advance()
            yield name


def _walk(root: Path) -> Iterator[str]:
    """Names of all under `root` that is no folder, and of empty folders that are named like images.

    A loop of links ends where it meets a folder that it came through.
    """
    ways: Counter[str] = Counter()
    waiting: list[tuple[str, str, frozenset[str]]] = [(str(root), "", frozenset())]
    while waiting:
        folder, name, above = waiting.pop()
        real = os.path.realpath(folder)
        if real in above:
            continue
        ways[real] += 1
        if ways[real] > MOST_WAYS:
            raise UserError(
                f"Links lead to {shown(folder)} in more than {MOST_WAYS} ways. Expected a folder "
                "of images: give one without these links."
            )
        inside, holds = above | {real}, False
        with os.scandir(folder) as entries:
            for entry in entries:
                holds = True
                if is_hidden(entry.name):
                    continue
                if _leads_to_folder(entry):
                    waiting.append((entry.path, f"{name}{entry.name}/", inside))
                else:
                    yield name + entry.name
        if not holds and _suffix(name.removesuffix("/")) in IMAGE_SUFFIXES:
            yield name.removesuffix("/")


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link into a folder that may not be read
        return False


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()
