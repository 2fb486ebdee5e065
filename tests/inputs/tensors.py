"""safetensors files written by hand, so that they can say what the library would not write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Header = dict[str, Any]


def header_of(content: bytes) -> tuple[Header, bytes]:
    """The header of a file, and the bytes of its tensors."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def file_of(header: Header | str, data: bytes) -> bytes:
    """A file with this header, which may say anything."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_header(change: Callable[[Header], Any]) -> Callable[[Path], None]:
    """The file's header is changed in place; its tensors stay."""

    def damage(path: Path) -> None:
        header, data = header_of(path.read_bytes())
        change(header)
        path.unlink()
        path.write_bytes(file_of(header, data))

    return damage


def with_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The same of a file that torch.save wrote."""

    def damage(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        changed = change(content)
        path.unlink()
        torch.save(content if changed is None else changed, path)

    return damage


def _entry(header: Header, **changes: Any) -> None:
    name = next(name for name in header if name != "__metadata__")
    header[name] = {**header[name], **changes}


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
HEADER_CHANGES: Mapping[str, Callable[[Header], Any]] = {
    "metadata of numbers": lambda h: h.update(__metadata__={"a": 5}),
    "metadata a list": lambda h: h.update(__metadata__=[1]),
    "metadata of 10^5 names": lambda h: h.update(
        __metadata__={f"n{k}": "x" for k in range(100_000)}
    ),
    "a shape of 10^18": lambda h: _entry(h, shape=[10**18]),
    "a shape below zero": lambda h: _entry(h, shape=[-1, 5]),
    "a shape of texts": lambda h: _entry(h, shape=["a"]),
    "a thousand axes": lambda h: _entry(h, shape=[1] * 1000),
    "an unknown dtype": lambda h: _entry(h, dtype="F1024"),
    "float8": lambda h: _entry(h, dtype="F8_E4M3"),
    "a dtype of a list": lambda h: _entry(h, dtype=["F32"]),
    "offsets outside": lambda h: _entry(h, data_offsets=[0, 10**15]),
    "offsets backwards": lambda h: _entry(h, data_offsets=[100, 0]),
    "offsets of texts": lambda h: _entry(h, data_offsets=["0", "9"]),
    "an entry that is a number": lambda h: h.update({next(iter(h)): 5}),
    "a further field": lambda h: _entry(h, surprise=1),
    "a name of 5,000": lambda h: h.update({"x" * 5000: EMPTY}),
    "a name with escapes": lambda h: h.update({"a\x1b[2Jb\nc": EMPTY}),
    "10^5 empty tensors": lambda h: h.update({f"e{k}": EMPTY for k in range(100_000)}),
    "a header without tensors": lambda h: h.clear(),
}
