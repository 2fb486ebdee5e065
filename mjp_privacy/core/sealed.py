# goes with the old run store
"""Files that carry their own SHA-256, so that one changed bit in them is noticed.

    write_sealed(path, write)       the writer leaves BLANK where the digest goes, once
    read_seal(path).whole           whether the file is as it was written
    write_sealed_json(path, {...})  the same for JSON, in a field `seal`

The digest is that of the whole file with zeros in the digest's own place. That place is in the
metadata: the footer of a parquet file, the header of a safetensors file, the beginning of a text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.read import FileKind, json_value, without_waiting

DIGITS = 64
BLANK = "mjp-seal:" + "0" * DIGITS
"""What a writer leaves for the digest, as a text in quotes or a line of its own."""

FIELD = "seal"
"""The field of a JSON file that holds it."""

IN_FOOTER = re.compile(rb"mjp-seal:([0-9a-f]{64})")
IN_HEADER = re.compile(rb'[" ]mjp-seal:([0-9a-f]{64})["\n]')
"""With both quotes: inside a JSON text, such as an image's name, quotes stand behind a \\."""

PARQUET = b"PAR1"
TRACES = (b"mjp-seal", b"mjp_privacy.seal", b"mjp_privacy.pictures")
"""Words in the metadata of files with a seal; one flipped bit leaves some of them."""
CHUNK = 1 << 20
MOST_HEADER_BYTES = 16 << 20
START_OF_TEXT = 1 << 12
"""Bytes of a text file in which its seal begins."""

CHANGED = "a file that changed after it was written: its seal is of another content"
NO_SEAL = "a file without a seal: it was damaged, or another program wrote it"


class Seal(NamedTuple):
    """What a file says of itself, and what it is."""

    digest: str  # of the file as it is, with zeros where its own digest stands
    written: str | None  # the digest that stands in the file; None: it has no seal

    @property
    def whole(self) -> bool:
        """Whether the file is as it was written."""
        return self.digest == self.written

    @property
    def fault(self) -> str:
        """What is wrong with it, in words; empty if it is whole."""
        return "" if self.whole else NO_SEAL if self.written is None else CHANGED


def write_sealed(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whose content has BLANK in it, put its digest there, and bring it to the disk:
    when this returns, the file is there whole and survives a loss of power."""

    def write_and_seal(temporary: Path) -> None:
        write(temporary)
        _seal(temporary)

    write_atomically(path, write_and_seal, durable=True)


def write_sealed_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write the fields of a JSON object, and its seal before them; NaN is an error."""
    text = json.dumps({FIELD: BLANK, **fields}, indent=1, ensure_ascii=False, allow_nan=False)
    write_sealed_text(path, text + "\n")


def write_sealed_text(path: Path, text: str) -> None:
    """Write a text that has BLANK in its first lines."""
    write_sealed(path, lambda temporary: temporary.write_bytes(text.encode("utf-8")))


def read_sealed_json(path: Path, kind: FileKind, *, needed: bool) -> Any:
    """The content of a JSON file without its seal; UserError unless the seal is right.

    needed: whether a file without a seal is refused; earlier versions wrote none
    """
    check_seal(path, kind, needed=needed)
    content = json_value(kind.text(path), path, kind)
    if isinstance(content, dict):
        content.pop(FIELD, None)
    return content


def check_seal(path: Path, kind: FileKind, *, needed: bool = True) -> None:
    """UserError unless the file is as it was written."""
    kind.check(path)
    with kind.reading(path):
        seal = read_seal(path)
    if not seal.whole and (needed or seal.written is not None):
        raise kind.refusal(path, seal.fault)


def read_seal(path: Path) -> Seal:
    """What the file says of itself and what it is; a file that did not change is read once."""
    status = path.stat()
    return _read_seal(path, status.st_ino, status.st_size, status.st_mtime_ns)


def forget_seals() -> None:
    """Read every file again: bits can rot without a trace in a file's times."""
    _read_seal.cache_clear()


def seal_now(path: Path) -> Seal:
    """The same, and the file is read whatever was known of it."""
    return _read_seal.__wrapped__(path, 0, 0, 0)


@lru_cache(maxsize=1 << 16)
def _read_seal(path: Path, inode: int, size: int, changed: int) -> Seal:
    with _opened(path) as file:
        place = _place(file)
        return Seal(_digest(file, place), None if place is None else _digits(file, place))


def _opened(path: Path) -> BinaryIO:
    """Open a file to read it. A pipe into which nobody writes is not waited for."""
    return open(path, "rb", buffering=0, opener=without_waiting)


def written_seal(path: Path) -> str | None:
    """The digest that stands in the file, unchecked; None if it has none."""
    with _opened(path) as file:
        place = _place(file)
        return None if place is None else _digits(file, place)


def had_seal(path: Path) -> bool:
    """Whether a file shows that it has or had a seal: words that stand around one are there."""
    with _opened(path) as file:
        region = _region(file)[1]
    return any(word in region for word in TRACES)


def _seal(path: Path) -> None:
    with path.open("r+b", buffering=0) as file:
        place = _place(file)
        if place is None or _digits(file, place) != "0" * DIGITS:
            raise ValueError(f"{path.name} has no place for a seal")
        digest = _digest(file, place)
        file.seek(place)
        file.write(digest.encode())


def _digits(file: BinaryIO, place: int) -> str:
    file.seek(place)
    return file.read(DIGITS).decode("ascii")


def _digest(file: BinaryIO, place: int | None) -> str:
    """The digest of the content, with zeros at `place`."""
    digest = hashlib.sha256()
    file.seek(0)
    if place is not None:
        digest.update(file.read(place))
        digest.update(b"0" * DIGITS)
        file.seek(place + DIGITS)
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _place(file: BinaryIO) -> int | None:
    """Where the file's digest stands; None where it has no place for one."""
    begin, region = _region(file)
    if region[:4] == PARQUET or begin:  # behind statistics, which may hold any words of the rows
        found = [match.start(1) for match in IN_FOOTER.finditer(region)]
        return begin + found[-1] if found else None
    match = IN_HEADER.search(region)
    return None if match is None else match.start(1)


def _region(file: BinaryIO) -> tuple[int, bytes]:
    """The metadata of a file, and where they begin: of a parquet file its footer, which is behind
    the rows; of others how they begin. Nothing of a parquet file that is cut off."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(8)
    if start[:4] != PARQUET:
        length = int.from_bytes(start, "little")
        return 0, start + file.read(length if length <= MOST_HEADER_BYTES else START_OF_TEXT)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    begin = size - 8 - length
    if begin < 4:
        return 0, PARQUET
    file.seek(begin)
    return begin, file.read(length)
