"""The entries of a zip, read in place: nothing is extracted, and no entry is read unbounded."""

from __future__ import annotations

import os
import re
import zipfile
from collections import Counter
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import MIB, FileKind, reason
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import MAX_BYTES, ImageError
from mjp_privacy.data.ids import named_by_id

ZIP = FileKind("a readable zip of images", "Make or copy it again.", 1 << 44)

BOMB_FROM = 16 * MIB
"""Bytes from which an entry may hold at most BOMB_RATIO times its compressed size."""

BOMB_RATIO = 200
"""Photographs hardly shrink; what a zip can shrink a thousandfold is no photograph."""


class ZipFiles:
    """The entries of a zip. Each process opens its own handle: it can be pickled and forked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: tuple[int, zipfile.ZipFile] | None = None
        size = ZIP.check(path)
        with ZIP.reading(path):
            entries = [info for info in self._archive.infolist() if not info.is_dir()]
        for info in entries:
            _refuse_unsafe(path, info.filename)
        if entries and all(_is_encrypted(info) for info in entries):
            raise ZIP.refusal(path, "one with encrypted content, and no password can be given")
        if sum(info.compress_size for info in entries) > size:
            raise ZIP.refusal(path, "entries that overlap, as in a zip bomb")
        counts = Counter(info.filename for info in entries if not is_hidden(info.filename))
        self._twice = frozenset(name for name, count in counts.items() if count > 1)
        by_id = named_by_id(counts)
        self.names = tuple(by_id)
        self._entries = {id_: name for id_, name in by_id.items() if id_ != name}

    @property
    def _archive(self) -> zipfile.ZipFile:
        if self._handle is None or self._handle[0] != os.getpid():
            self._handle = (os.getpid(), zipfile.ZipFile(self.path))
        return self._handle[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_handle": None}

    def read(self, name: str) -> bytes:
        """The content of an entry; ImageError if it is too large, damaged or a zip bomb."""
        entry = self._entries.get(name, name)
        if entry in self._twice:
            raise ImageError("two entries of the zip have this name")
        try:
            info = self._archive.getinfo(entry)
            _refuse_unreadable(info)
            return self._archive.read(info)
        except ImageError:
            raise
        except Exception as error:
            raise ImageError(
                f"damaged inside the zip {shown(self.path.name)} ({reason(error)})"
            ) from error


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder above it, is one that file managers hide."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _is_encrypted(info: zipfile.ZipInfo) -> bool:
    return bool(info.flag_bits & 0x1)


def _refuse_unreadable(info: zipfile.ZipInfo) -> None:
    """Raise ImageError for an entry that must not be unpacked."""
    if _is_encrypted(info):
        raise ImageError("encrypted inside the zip; make the zip again without a password")
    if info.file_size > MAX_BYTES:
        raise ImageError(f"the file is larger than {MAX_BYTES >> 20} MiB")
    if info.file_size > max(BOMB_FROM, BOMB_RATIO * info.compress_size):
        packed, whole = (
            f"{bytes_ / MIB:,.1f} MiB" for bytes_ in (info.compress_size, info.file_size)
        )
        raise ImageError(f"a zip bomb: {packed} would become {whole}")


def _refuse_unsafe(path: Path, name: str) -> None:
    if name.startswith("/") or "\\" in name or re.match(r"[A-Za-z]:", name):
        fault = "an absolute path or a backslash"
    elif ".." in name.split("/"):
        fault = "'..'"
    else:
        return
    raise UserError(
        f"{shown(path)} holds an entry with {fault}: {shown(repr(name))}. Expected plain relative "
        "names; make the zip again from the folder of images."
    )
