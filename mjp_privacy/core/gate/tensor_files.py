"""safetensors files: the header is checked before a byte of a tensor is allocated.

    file = TensorFile(path, WEIGHTS)       # reads the header
    file.shapes["head.bias"]               # (10,)
    file.tensors(["head.bias"])            # reads that tensor

The format: eight bytes of length, a JSON header {name: {dtype, shape, data_offsets}}, the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjp_privacy.core.gate.file_kind import FileKind
from mjp_privacy.core.gate.json_files import json_value
from mjp_privacy.core.shown import shown

if TYPE_CHECKING:
    from torch import Tensor

LENGTH_BYTES = 8  # before the header: its length, little endian
MOST_HEADER_BYTES = 16 << 20
MOST_AXES = 8
MOST_NAME = 500  # characters
METADATA = "__metadata__"

SIZES: Mapping[str, int] = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}
"""Bytes of one entry, for every type that is read; float8, complex numbers and others are not."""

FLOATS = ("F64", "F32", "F16", "BF16")


class TensorFile:
    """A safetensors file whose header is sound. Names, shapes and metadata are known at once.

    dtypes: the types that its tensors may have, of those in SIZES
    """

    def __init__(self, path: Path, kind: FileKind, dtypes: Collection[str] = tuple(SIZES)) -> None:
        self.path, self.kind = path, kind
        size = kind.check(path)
        with kind.reading(path), path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
                raise kind.refusal(path, "a file that is cut off, or no safetensors file at all")
            text = file.read(length).decode("utf-8")
        header = json_value(text, path, kind)
        if not isinstance(header, dict):
            raise kind.refusal(path, "a header that lists no tensors")
        self.metadata: dict[str, str] = self._checked_metadata(header.pop(METADATA, None) or {})
        self.dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._check_layout(header, size - LENGTH_BYTES - length, dtypes)

    def _checked_metadata(self, content: Any) -> dict[str, str]:
        if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
            raise self.kind.refusal(self.path, "metadata that are no texts by name", METADATA)
        return content

    def _check_layout(self, header: dict[str, Any], size: int, dtypes: Collection[str]) -> None:
        """Every tensor's entry is sound, and together they fill the rest of the file exactly."""
        places = []
        for name, entry in header.items():
            if len(name) > MOST_NAME:
                raise self.kind.refusal(self.path, f"a name of {len(name)} characters", name[:60])
            places.append(self._check_entry(name, entry, dtypes))
        at = 0
        for begin, end in sorted(places):
            if begin != at:
                raise self.kind.refusal(self.path, "tensors that overlap or leave gaps")
            at = end
        if at != size:
            raise self.kind.refusal(
                self.path,
                f"{size} bytes of tensors where its header says {at}: it is cut off, "
                "or something was added",
            )

    def _check_entry(self, name: str, entry: Any, dtypes: Collection[str]) -> tuple[int, int]:
        """Note one tensor's shape and type; where it begins and ends."""
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self.kind.refusal(self.path, "no dtype, shape and data_offsets", name)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in dtypes or dtype not in SIZES:
            allowed = ", ".join(dtypes)
            raise self.kind.refusal(
                self.path, f"entries of type {shown(dtype, 40)} where {allowed} are read", name
            )
        if not _are_counts(shape) or len(shape) > MOST_AXES:
            raise self.kind.refusal(self.path, f"the shape {shown(shape, 60)}", name)
        if not _are_counts(offsets) or len(offsets) != 2:
            raise self.kind.refusal(self.path, f"the place {shown(offsets, 60)}", name)
        if math.prod(shape) * SIZES[dtype] != offsets[1] - offsets[0]:
            raise self.kind.refusal(
                self.path, f"{offsets[1] - offsets[0]} bytes for {tuple(shape)} of {dtype}", name
            )
        self.dtypes[name], self.shapes[name] = dtype, tuple(shape)
        return offsets[0], offsets[1]

    @cached_property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self.shapes)

    def tensors(
        self, names: Iterable[str] | None = None, *, finite: bool = False
    ) -> dict[str, Tensor]:
        """These tensors, or all, as they are stored; `finite`: NaN and infinity are refused."""
        from safetensors import safe_open

        with self.kind.reading(self.path), safe_open(self.path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in names or self.names}
        if finite:
            self.check_finite(tensors)
        return tensors

    def check_finite(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if a floating-point tensor holds NaN or infinity."""
        check_finite(tensors, self.path, self.kind)

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
            bad = int((~tensor.isfinite()).sum())
            raise kind.refusal(
                path, f"{bad} of {tensor.numel()} numbers that are NaN or infinite", name
            )


def _are_counts(numbers: Any) -> bool:
    """Whether this is a list of whole numbers that a file's header can hold."""
    return isinstance(numbers, Sequence) and all(
        type(number) is int and 0 <= number < 1 << 48 for number in numbers
    )


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """A header as the format has it, with its length before it."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
