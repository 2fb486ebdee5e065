"""safetensors files written by hand, so that they can say what the library would not write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Header = dict[str, Any]


def header_of(content: bytes) -> tuple[Header, bytes]:
    """The header of a file, and the bytes of its tensors."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def file_of(header: Header | str, data: bytes) -> bytes:
    """A file with this header, which may say anything."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_metadata(content: bytes, metadata: Mapping[str, str]) -> bytes:
    """The file with further metadata."""
    header, data = header_of(content)
    header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
    return file_of(header, data)


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
        from safetensors import safe_open
        from safetensors.torch import save

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
        import torch

        content = torch.load(path, weights_only=True)
        changed = change(content)
        path.unlink()
        torch.save(content if changed is None else changed, path)

    return damage


def first(tensors: Mapping[str, Any], *wanted: str) -> str:
    """The first of these names that is there, else any."""
    return next((name for name in wanted if name in tensors), next(iter(tensors)))


def _entry(header: Header, **changes: Any) -> None:
    name = next(name for name in header if name != "__metadata__")
    header[name] = {**header[name], **changes}


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
    "a name of 5,000": lambda h: h.update(
        {"x" * 5000: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    ),
    "a name with escapes": lambda h: h.update(
        {"a\x1b[2Jb\nc": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    ),
    "10^5 empty tensors": lambda h: h.update(
        {f"e{k}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for k in range(100_000)}
    ),
    "a header without tensors": lambda h: h.clear(),
}


def _of(tensor: Any, **changes: Any) -> Any:
    import torch

    value = changes.get("value")
    return tensor.clone() if value is None else torch.full_like(tensor, value)


def _each(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name] = change(tensors[name])

    return apply


def _one(wanted: tuple[str, ...], change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(tensors: dict[str, Any]) -> None:
        name = first(tensors, *wanted)
        tensors[name] = change(tensors[name])

    return apply


def _cast(name: str) -> Callable[[Any], Any]:
    import torch

    return lambda tensor: tensor.to(getattr(torch, name))


def _spoiled_entry(value: float) -> Callable[[Any], Any]:
    def change(tensor: Any) -> Any:
        tensor = tensor.clone() if tensor.is_floating_point() else tensor.float()
        tensor.view(-1)[0] = value
        return tensor

    return change


def tensor_changes(*names: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Changes of tensors that any reader may meet; those of one tensor hit the first of `names`."""
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for dtype in ("float16", "bfloat16", "float64", "int8", "uint8", "int64", "bool", "complex64"):
        changes[f"all {dtype}"] = _each(_cast(dtype))
        changes[f"{names[0] if names else 'first'} {dtype}"] = _one(names, _cast(dtype))
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        changes[f"all {dtype}"] = _each(_cast(dtype))
    for name in names:
        changes |= {
            f"{name} NaN": _one((name,), _spoiled_entry(float("nan"))),
            f"{name} infinite": _one((name,), _spoiled_entry(float("inf"))),
            f"{name} 1e38": _one((name,), lambda t: (t.float() * 0 + 1e38).to(t.dtype)),
            f"{name} missing": lambda tensors, name=name: tensors.pop(name, None),
            f"{name} scalar": _one((name,), lambda t: t.reshape(-1)[0].clone()),
            f"{name} no rows": _one((name,), lambda t: t[:0].clone()),
            f"{name} one row more": _one((name,), lambda t: _longer(t)),
            f"{name} transposed": _one((name,), lambda t: t.transpose(0, -1) if t.ndim else t),
            f"{name} leading axis": _one((name,), lambda t: t.unsqueeze(0)),
            f"{name} flat": _one((name,), lambda t: t.reshape(-1).clone()),
            f"{name} last axis empty": _one((name,), lambda t: t[..., :0].clone()),
            f"{name} ten axes": _one((name,), lambda t: t.reshape(*[1] * 8, *t.shape)),
        }
    changes["no tensors"] = lambda tensors: tensors.clear()
    changes["zeros"] = _each(lambda t: t * 0)
    changes["a stranger"] = lambda tensors: tensors.update(
        {"stranger.weight": next(iter(tensors.values())).clone()}
    )
    changes["blocks.foo.weight"] = lambda tensors: tensors.update(
        {"blocks.foo.weight": next(iter(tensors.values())).clone()}
    )
    changes["a block of number 10^9"] = lambda tensors: tensors.update(
        {"blocks.1000000000.norm1.weight": next(iter(tensors.values())).clone()}
    )
    changes["an empty name"] = lambda tensors: tensors.update(
        {"": next(iter(tensors.values())).clone()}
    )
    changes["escapes in a name"] = lambda tensors: tensors.update(
        {"a\x1b[2Jb\nc": next(iter(tensors.values())).clone()}
    )
    return changes


def _longer(tensor: Any) -> Any:
    import torch

    return torch.cat([tensor, tensor[:1]]) if tensor.ndim else tensor.repeat(2)
