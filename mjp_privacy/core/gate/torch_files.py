"""PyTorch's own file format, read without executing anything in it.

A file is a zip of one pickle (names, shapes, settings) and of bytes; older ones are pickles with
the bytes behind them. The pickle is small in any honest file, so its size is bounded before it is
read; the bytes are stored as they are, so what is not is no file of torch.save.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjp_privacy.core.gate.file_kind import MIB, FileKind
from mjp_privacy.core.shown import shown

if TYPE_CHECKING:
    from torch import Tensor

MOST_PICKLED = 8 * MIB
"""Names, shapes and settings of 50,000 tensors."""
MOST_LISTED = 8 * MIB
"""Bytes in which a zip lists its entries, so about 100,000 of them."""
LONGEST_COMMENT = 1 << 16  # that can stand behind a zip's end
BEGIN = b"PK\x03\x04"
END, END_BYTES = b"PK\x05\x06", 22
"""The marks that begin a zip and its end, and the length of that end."""
LISTED_FROM = 12  # where the end says how long the list of entries is
SIZE_IN_64_BITS = 0xFFFFFFFF  # what stands there where the zip's 64-bit end says it
END64, LISTED64_FROM, END64_BYTES = b"PK\x06\x06", 40, 56


def read_torch_file(
    path: Path, kind: FileKind, allowed: Collection[Any] = (), *, own: bool = False
) -> Any:
    """What torch.save wrote: plain containers, numbers, texts and tensors on the CPU.

    allowed  classes that are read as such, as torch.serialization.safe_globals takes them
    own      the file is one of this package's: its checksums are verified, and all of it is read.
             Of any other, tensors are read when they are used.
    """
    import torch

    kind.check(path)
    with kind.reading(path), path.open("rb") as file:
        zipped = file.read(len(BEGIN)) == BEGIN
    if zipped:
        _check_zip(path, kind, verified=own)
    try:
        with torch.serialization.safe_globals(list(allowed)):
            if zipped:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=not own)
            with _OldFile(path) as old:
                return torch.load(old, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged or foreign file makes the unpickler raise errors of many classes (struct,
        # unicode, index, ...); they all mean that it cannot be read.
        raise kind.refusal(
            path, f"what cannot be read as plain weights ({_said(error)})"
        ) from error


def check_stored(tensors: Mapping[str, Tensor], path: Path, kind: FileKind) -> None:
    """Raise for a tensor whose numbers do not stand in the file: an empty one of torch's meta
    device, a sparse one, or a number repeated to a shape that no memory holds."""
    import torch

    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            got = f"a tensor of {tensor.layout} on {tensor.device}, not plain numbers"
            raise kind.refusal(path, got, name)
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            got = f"the shape {tuple(tensor.shape)}, of which the file holds a part of the numbers"
            raise kind.refusal(path, got, name)


def _check_zip(path: Path, kind: FileKind, *, verified: bool) -> None:
    """Raise unless the zip is of stored entries that fit into the file, and its pickle is small."""
    with kind.reading(path):
        listed = _listed_bytes(path)
    if listed is None:
        raise kind.refusal(path, "a zip without its end: it is cut off")
    if listed > MOST_LISTED:
        raise kind.refusal(path, f"a list of entries of {listed / MIB:.0f} MiB")
    with kind.reading(path):
        archive = zipfile.ZipFile(path)
    with archive:
        entries = archive.infolist()
        _check_entries(entries, path, kind)
        if verified:
            with kind.reading(path):
                damaged = archive.testzip()
            if damaged is not None:
                raise kind.refusal(path, f"damaged bytes in {shown(damaged, 60)}")


def _check_entries(entries: Sequence[zipfile.ZipInfo], path: Path, kind: FileKind) -> None:
    packed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        name = shown(packed[0].filename, 60)
        raise kind.refusal(path, f"a zip whose entry {name} is compressed, as torch.save has none")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise kind.refusal(path, "entries that are together larger than the file")
    pickled = max((e.file_size for e in entries if e.filename.endswith(".pkl")), default=0)
    if pickled > MOST_PICKLED:
        raise kind.refusal(path, _too_much(pickled))


def _listed_bytes(path: Path) -> int | None:
    """The length of the list of entries, as the end of the zip states it; None without an end."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(size - LONGEST_COMMENT - END_BYTES - END64_BYTES, 0))
        tail = file.read()
    at = tail.rfind(END)
    if at < 0:
        return None
    (listed,) = struct.unpack_from("<I", tail, at + LISTED_FROM)
    if listed != SIZE_IN_64_BITS:
        return int(listed)
    (listed,) = struct.unpack_from("<Q", tail, tail.rfind(END64) + LISTED64_FROM)
    return int(listed)


class _OldFile(io.BufferedReader):
    """A file of the older format, of which only so many bytes are read as a pickle; the bytes of
    tensors are read past this class."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.left = MOST_PICKLED

    def _count(self, read: int) -> None:
        self.left -= read
        if self.left < 0:
            raise ValueError(_too_much(MOST_PICKLED + 1))

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self._count(len(content))
        return content

    def readline(self, size: int | None = -1) -> bytes:
        content = super().readline(MOST_PICKLED if size is None or size < 0 else size)
        self._count(len(content))
        return content

    def readinto(self, buffer: Any) -> int:
        read = super().readinto(buffer)
        self._count(read)
        return read


def _too_much(pickled: int) -> str:
    return (
        f"{pickled / MIB:.1f} MiB of names and settings beside the tensors, more than "
        f"{MOST_PICKLED / MIB:.0f} MiB"
    )


def _said(error: Exception) -> str:
    """The line of torch's long message that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line]
    return shown((telling or lines or [type(error).__name__])[0], 200)
