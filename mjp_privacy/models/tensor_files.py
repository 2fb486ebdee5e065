"""Tensors in files: safetensors, and PyTorch's own format read without executing anything in it."""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.read import MIB, FileKind, json_value, without_waiting
from mjp_privacy.core.text import shown

if TYPE_CHECKING:
    from torch import Tensor

MOST_HEADER_BYTES = 16 * MIB  # of a safetensors file
# safetensors -------------------------------------------------------------------------------------

MOST_AXES = 8
MOST_NAME = 500  # characters
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = (*FLOATS, "I64", "I32", "I16", "I8", "U8", "BOOL")
"""Types of entries that are read; float8, complex numbers and others are not."""


class TensorFile:
    """A safetensors file whose header is sound: the library checks it against the file's length
    before a byte of a tensor is allocated. Names, shapes and metadata are known at once.

        file = TensorFile(path, WEIGHTS)
        file.shapes["head.bias"]               # (10,)
        file.tensors(["head.bias"])            # reads that tensor

    dtypes: the types that its tensors may have
    """

    def __init__(self, path: Path, kind: FileKind, dtypes: Collection[str] = DTYPES) -> None:
        from safetensors import safe_open

        self.path, self.kind = path, kind
        size = kind.check(path)
        with kind.reading(path), path.open("rb") as start:
            length = int.from_bytes(start.read(8), "little")
            if not 0 < length <= min(size - 8, MOST_HEADER_BYTES):
                raise kind.refusal(path, "a file that is cut off, or no safetensors file at all")
            header = json_value(start.read(length).decode(), path, kind)
        with kind.reading(path):
            entries = [entry for name, entry in header.items() if name != "__metadata__"]
            if size < 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0):
                raise kind.refusal(path, "a file that is cut off")
        with kind.reading(path), safe_open(path, framework="np"):  # which checks the header
            self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
            self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
            self.dtypes = {name: entry["dtype"] for name, entry in header.items()}
        self.metadata.pop(DIGEST_KEY, None)
        self.names = sorted(self.shapes)
        for name, shape in self.shapes.items():
            if len(name) > MOST_NAME:
                raise kind.refusal(path, f"a name of {len(name)} characters", name[:60])
            if self.dtypes[name] not in dtypes:
                got = f"entries of type {self.dtypes[name]} where {', '.join(dtypes)} are read"
                raise kind.refusal(path, got, name)
            if len(shape) > MOST_AXES:
                raise kind.refusal(path, f"the shape {shown(shape, 60)}", name)

    def tensors(
        self, names: Iterable[str] | None = None, *, finite: bool = False
    ) -> dict[str, Tensor]:
        """These tensors, or all, as they are stored; `finite`: NaN and infinity are refused."""
        from safetensors import safe_open

        with self.kind.reading(self.path), safe_open(self.path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in names or self.names}
        if finite:
            check_finite(tensors, self.path, self.kind)
        return tensors

    def metadata_value(self, name: str) -> Any:
        """An entry of the metadata that is JSON; None where there is none."""
        text = self.metadata.get(name)
        return None if text is None else json_value(text, self.path, self.kind)


def check_finite(tensors: Mapping[str, Tensor], path: Path, kind: FileKind) -> None:
    """Raise if a floating-point tensor of a file holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = tensor.aminmax()  # both are NaN where any number is
        if not (low.isfinite() and high.isfinite()):
            got = f"{int((~tensor.isfinite()).sum())} of {tensor.numel()} numbers that are NaN"
            raise kind.refusal(path, f"{got} or infinite", name)


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, digest: bool = False
) -> None:
    """Write tensors by name and strings about them; the bytes follow from the content alone.

    digest: the file carries its own digest, and survives a loss of power
    """
    from safetensors.torch import save_file

    memories: set[int] = set()
    apart = {}  # tensors with memory of their own: autograd hands out slices of one gradient
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in memories else tensor
        memories.add(memory)

    def write(temporary: Path) -> None:
        save_file(apart, temporary, {**metadata, **({DIGEST_KEY: BLANK_DIGEST} if digest else {})})
        # The library's order of the metadata changes from process to process. The header keeps its
        # length, as spaces behind it are allowed.
        with temporary.open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            if "__metadata__" in header:
                header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            assert len(text) <= length, "the same header, written as compactly, is no longer"
            file.seek(8)
            file.write(text.ljust(length))

    (write_with_digest if digest else write_atomically)(path, write)


# digests -----------------------------------------------------------------------------------------

DIGEST_KEY = "mjp-seal"
"""The entry of a safetensors file's metadata that holds its digest; `seal` in a JSON file."""
BLANK_DIGEST = "mjp-seal:" + "0" * 64
DIGEST = re.compile(rb'[" ]mjp-seal:([0-9a-f]{64})["\n]')
"""With both quotes: inside a JSON text, such as an image's name, quotes stand behind a \\."""


def write_with_digest(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that carries its own SHA-256, for `check_digest`, and bring it to the disk.

    The writer leaves BLANK_DIGEST once, in quotes or as a line's end, in the header of a
    safetensors file or in the first lines of a text; the digest of the whole file takes its place.
    """

    def write_and_sign(temporary: Path) -> None:
        write(temporary)
        content, digest = digests.__wrapped__(temporary)
        if digest is None or content != "0" * 64:
            raise ValueError(f"{path.name} has no place for its digest")
        with temporary.open("r+b") as file:
            if found := DIGEST.search(file.read(MOST_HEADER_BYTES)):
                file.seek(found.start(1))
                file.write(digest.encode())

    write_atomically(path, write_and_sign, durable=True)


def check_digest(path: Path, kind: FileKind, *, needed: bool = False) -> None:
    """UserError unless the file is as `write_with_digest` wrote it: one changed bit is
    noticed. A file that never had a digest passes, unread, unless it is `needed`."""
    kind.check(path)
    with kind.reading(path):
        status = path.stat()
        written, digest = digests(path, status.st_ino, status.st_size, status.st_mtime_ns)
    if written is None and (needed or digest is not None):
        raise kind.refusal(path, "a file without its digest: it is damaged, or another's")
    if written != digest:
        raise kind.refusal(path, "a file that changed after it was written, as its digest says")


@lru_cache(maxsize=1 << 12)
def digests(path: Path, *_status: int) -> tuple[str | None, str | None]:
    """The digest that stands in the first part of a file, and that of its bytes with zeros in the
    former's place, which is not taken where the file shows no trace of one."""
    with open(path, "rb", opener=without_waiting) as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        start += file.read(length if length <= MOST_HEADER_BYTES else 4096)
        found = DIGEST.search(start)
        if found is None:
            return None, "damaged" if DIGEST_KEY.encode() in start else None
        start = start[: found.start(1)] + b"0" * 64 + start[found.end(1) :]
        digest = hashlib.sha256(start)
        while chunk := file.read(MIB):
            digest.update(chunk)
        return found[1].decode(), digest.hexdigest()


# PyTorch's format --------------------------------------------------------------------------------

MOST_PICKLED = 8 * MIB
"""Names, shapes and settings of 50,000 tensors."""
PICKLE = b"\x80"
"""How a pickle begins, by whatever protocol torch.save made it."""
OF_CODE = re.compile(r"GLOBAL ([\w.]+)")
"""How torch names the class or function that a file asks for."""
MOST_LISTED = 8 * MIB
"""Bytes in which a zip lists its entries, so about 100,000 of them."""


def read_torch_file(
    path: Path, kind: FileKind, allowed: Collection[Any] = (), *, own: bool = False
) -> Any:
    """What torch.save wrote: plain containers, numbers, texts and tensors on the CPU. Nothing in it
    is executed, and what is unpickled is bounded first: a zip of one pickle (names, shapes,
    settings) and of stored bytes, or in older files a pickle with the bytes behind it.

    allowed  classes that are read as such, as torch.serialization.safe_globals takes them
    own      the file is one of this package's: its checksums are verified, and all of it is read.
             Of any other, tensors are read when they are used.
    """
    import torch

    kind.check(path)
    with kind.reading(path), path.open("rb") as file:
        start = file.read(9)
    zipped = start.startswith(b"PK\x03\x04")
    if zipped:
        _check_zip(path, kind, verified=own)
    elif start.endswith(b"{") and len(start) == 9:  # a header in JSON, after its length
        got = "what looks like a safetensors file under another name: call it NAME.safetensors"
        raise kind.refusal(path, got)
    elif not start.startswith(PICKLE):
        raise kind.refusal(path, "a file that torch.save did not write" if start else "no bytes")
    with (
        kind.reading(path),
        torch.serialization.safe_globals(list(allowed)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what torch advises is for those who trust the file
        try:
            if zipped:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=not own)
            with _OldFile(path) as old:
                return torch.load(old, map_location="cpu", weights_only=True)
        except Exception as error:
            if type(error).__name__ != "UnpicklingError":
                raise
            found = OF_CODE.search(str(error))
            what = shown(found[1], 100) if found else "a pickle of another kind"
            got = f"a file that holds more than tensors ({what}), and no code of a file is run"
            raise kind.refusal(path, got) from error


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
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(size - (1 << 16) - 22, 0))
        _, mark, end = file.read().rpartition(b"PK\x05\x06")
    if not mark:
        raise kind.refusal(path, "a zip without its end: it is cut off")
    if int.from_bytes(end[8:12], "little") > MOST_LISTED:
        raise kind.refusal(path, f"a list of more than {MOST_LISTED // MIB} MiB of entries")
    with kind.reading(path), zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise kind.refusal(path, "a zip with compressed entries, as torch.save writes none")
        if sum(entry.file_size for entry in entries) > size:
            raise kind.refusal(path, "entries that are together larger than the file")
        if any(e.file_size > MOST_PICKLED for e in entries if e.filename.endswith(".pkl")):
            raise kind.refusal(path, TOO_MUCH_PICKLED)
        if verified and (damaged := archive.testzip()) is not None:
            raise kind.refusal(path, f"damaged bytes in {shown(damaged, 60)}")


class _OldFile(io.BufferedReader):
    """A file of the older format, of which only so many bytes are read as a pickle; the bytes of
    tensors are read past this class."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.left = MOST_PICKLED

    def _counted(self, content: bytes) -> bytes:
        self.left -= len(content)
        if self.left < 0:
            raise ValueError(TOO_MUCH_PICKLED)
        return content

    def read(self, size: int | None = -1) -> bytes:
        return self._counted(super().read(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._counted(super().readline(MOST_PICKLED + 1))


TOO_MUCH_PICKLED = f"more than {MOST_PICKLED // MIB} MiB of names and settings beside the tensors"
