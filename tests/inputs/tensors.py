"""safetensors files written by hand, so that they can say what the library would not write."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

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


def with_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The file holds other tensors; its metadata stay."""

    def damage(path: Path) -> None:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata()
        change(tensors)
        content = save({n: t.contiguous() for n, t in tensors.items()}, metadata)
        path.unlink()
        path.write_bytes(content)

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

DTYPES = ("float16", "bfloat16", "float64", "int8", "int64", "bool", "complex64", "float8_e4m3fn")
SHAPES: Mapping[str, Callable[[Any], Any]] = {
    "NaN": lambda t: t.float() * float("nan"),
    "infinite": lambda t: t.float() + float("inf"),
    "1e38": lambda t: (t.float() * 0 + 1e38).to(t.dtype),
    "scalar": lambda t: t.reshape(-1)[0].clone(),
    "no rows": lambda t: t[:0].clone(),
    "twice": lambda t: t.repeat(2, *[1] * (t.ndim - 1)) if t.ndim else t.repeat(2),
    "transposed": lambda t: t.transpose(0, -1) if t.ndim else t,
    "leading axis": lambda t: t.unsqueeze(0),
    "last axis empty": lambda t: t[..., :0].clone(),
    "ten axes": lambda t: t.reshape(*[1] * 8, *t.shape),
}
STRANGERS = (
    "stranger.weight",
    "blocks.foo.weight",
    "blocks.1000000000.norm1.weight",
    "",
    "a\x1b[2J",
)


def tensor_changes(*names: str) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Changes of tensors that any reader may meet; those of one tensor hit each of `names`."""
    for dtype in DTYPES:
        yield partial(of_type, dtype=getattr(torch, dtype))
    for name in names:
        yield lambda held, name=name: held.pop(name, None)
        for change in SHAPES.values():
            yield lambda held, name=name, change=change: held.update({name: change(held[name])})
    for name in STRANGERS:
        yield lambda held, name=name: held.update({name: torch.zeros(2)})
    yield lambda held: held.clear()
    yield lambda held: held.update({name: 0 * tensor for name, tensor in held.items()})


def of_type(tensors: dict[str, Any], dtype: torch.dtype) -> None:
    """Every tensor has this type."""
    tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
