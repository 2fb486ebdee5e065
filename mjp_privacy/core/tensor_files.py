"""safetensors files whose bytes follow from their content alone.

The library writes metadata in an order that changes from process to process. A file's hash names
rows and weights here, so that order is made alphabetical.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.gate.file_kind import FileKind
from mjp_privacy.core.sealed import BLANK, check_seal, had_seal, write_sealed, written_seal

if TYPE_CHECKING:
    from torch import Tensor

SEAL = "mjp-seal"
"""The entry of the metadata that holds a file's seal."""
LENGTH_BYTES = 8  # before the header: its length, little endian


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    sealed: bool = False,
) -> None:
    """Write tensors by name and strings about them; the file is there whole or not at all.

    sealed: it carries its own digest in its metadata (`core/sealed`), and survives a loss of power
    """
    from safetensors.torch import save_file

    def write(temporary: Path) -> None:
        seal = {SEAL: BLANK} if sealed else {}
        save_file(_apart(tensors), temporary, {**metadata, **seal})
        _sort_metadata(temporary)

    if sealed:
        write_sealed(path, write)
    else:
        write_atomically(path, write)


def check_tensor_seal(path: Path, kind: FileKind) -> None:
    """UserError unless the file is as it was written; one that never had a seal passes, unread."""
    kind.check(path)
    with kind.reading(path):
        is_sealed = written_seal(path) is not None or had_seal(path)
    if is_sealed:
        check_seal(path, kind)  # a seal that is damaged itself is none


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with memory of their own, as the library wants them: autograd hands out slices
    of one gradient under several names."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return apart


def _sort_metadata(path: Path) -> None:
    """Rewrite the header in place; it keeps its length, spaces behind it are allowed."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        if "__metadata__" not in header:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the same header, written as compactly, is no longer"
        file.seek(LENGTH_BYTES)
        file.write(text.ljust(length))
