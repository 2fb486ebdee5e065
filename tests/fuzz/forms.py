"""Changes of files that have a form of their own: tables, headers of tensors, zips, torch.save."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Sequence
from typing import Any

from tests.fuzz.mutations import VALUES, Chance, as_json, changed_bytes, changed_tree
from tests.inputs.tensors import file_of, header_of


def changed_table(content: bytes, chance: Chance, others: Sequence[bytes] = ()) -> bytes:
    """Another table of text: cells, columns and lines are others."""
    if chance.random() < 0.4:
        return changed_bytes(content, chance, others)
    rows = [line.split(b",") for line in content.split(b"\n")]
    for _ in range(chance.choice((1, 1, 2, 4))):
        row = chance.choice(rows[:2] if chance.random() < 0.4 else rows)
        at = chance.randrange(len(row))
        kind = chance.randrange(6)
        if kind == 0:
            row[at] = str(chance.choice(VALUES)).encode("utf-8", "surrogatepass")
        elif kind == 1:
            row.insert(at, chance.choice(row))
        elif kind == 2:
            row[at] = b'"' + row[at]
        elif kind == 3:
            del row[at]
        elif kind == 4:
            rows.insert(chance.randrange(len(rows)), list(chance.choice(rows)))
        else:
            row[at] = changed_bytes(row[at], chance)
        rows = [row for row in rows if row] or [[b""]]
    return chance.choice((b"\n", b"\r\n", b"\r")).join(b",".join(row) for row in rows)


def changed_safetensors(content: bytes, chance: Chance, others: Sequence[bytes] = ()) -> bytes:
    """Another safetensors file: header, metadata or numbers are others."""
    kind = chance.random()
    if kind < 0.25:
        return changed_bytes(content, chance, others)
    header, data = header_of(content)
    if kind < 0.45 and header.get("__metadata__"):
        facts = header["__metadata__"]
        key = chance.choice(list(facts))
        header["__metadata__"] = {**facts, key: _changed_text(facts[key], chance)}
    elif kind < 0.6:
        data = changed_bytes(data, chance)
        data = data[: len(header) and _length(header)].ljust(_length(header), b"\0")
    elif kind < 0.85:
        header = _resized(header, chance)
        data = data[: _length(header)].ljust(_length(header), b"\0")
    else:
        header = changed_tree(header, chance)
    return file_of(as_json(header, chance).decode("utf-8", "replace"), data)


SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1}


def _length(header: dict[str, Any]) -> int:
    ends = (e["data_offsets"][1] for name, e in header.items() if name != "__metadata__")
    return min(max(ends, default=0), 1 << 20)


def _resized(header: dict[str, Any], chance: Chance) -> dict[str, Any]:
    """Tensors of other shapes, types and names in a header that is sound in itself."""
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    name = chance.choice(list(entries))
    kind, entry = chance.randrange(5), dict(entries[name])
    if kind == 0:
        entry["dtype"] = chance.choice(list(SIZES))
    elif kind == 1:
        shape = list(entry["shape"]) or [1]
        shape[chance.randrange(len(shape))] = chance.choice((0, 1, 2, 3, 7, 41))
        entry["shape"] = shape
    elif kind == 2:
        entry["shape"] = chance.choice(([], [1], [0], [1, *entry["shape"]], entry["shape"][1:]))
    entries[name] = entry
    if kind == 3:
        del entries[name]
    elif kind == 4:
        entries[chance.choice((f"{name}x", "blocks.foo", "blocks.9.norm1.weight", ""))] = entry
    at = 0
    for name, entry in entries.items():
        size = math.prod(entry["shape"]) * SIZES.get(entry["dtype"], 4)
        entries[name] = {**entry, "data_offsets": [at, at + size]}
        at += size
    facts = {"__metadata__": header["__metadata__"]} if "__metadata__" in header else {}
    return {**facts, **entries}


def _changed_text(text: str, chance: Chance) -> str:
    if chance.random() < 0.7:
        try:
            return as_json(changed_tree(json.loads(text), chance), chance).decode(
                "utf-8", "replace"
            )
        except ValueError:
            pass
    return changed_bytes(text.encode(), chance).decode("utf-8", "replace")


def changed_zip(content: bytes, chance: Chance, others: Sequence[bytes] = ()) -> bytes:
    """Another zip: entries of other names, content or methods."""
    if chance.random() < 0.6:
        return changed_bytes(content, chance, others)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = chance.randrange(len(entries))
    name, inner = entries[at]
    names = (name, f"../{name}", f"/{name}", name.upper(), "labels.csv", "a\x1bb.png", "x" * 300)
    entries[at] = (chance.choice(names), changed_bytes(inner, chance))
    buffer = io.BytesIO()
    method = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, inner in entries:
            archive.writestr(zipfile.ZipInfo(name), inner)
    return buffer.getvalue()


def changed_torch(content: bytes, chance: Chance, others: Sequence[bytes] = ()) -> bytes:
    """Another file of torch.save: of other values, shapes or bytes."""
    if chance.random() < 0.5:
        return changed_bytes(content, chance, others)
    import torch

    tree = torch.load(io.BytesIO(content), weights_only=True)
    buffer = io.BytesIO()
    torch.save(
        changed_state(tree, chance), buffer, _use_new_zipfile_serialization=chance.random() < 0.8
    )
    return buffer.getvalue()


def changed_state(tree: Any, chance: Chance) -> Any:
    """A tree in which a tensor, or what holds it, is another."""
    import torch

    if isinstance(tree, torch.Tensor):
        kind = chance.randrange(7)
        if kind == 0:
            return tree.reshape(-1)[: chance.choice((0, 1, 5))].clone()
        if kind == 1:
            return tree.unsqueeze(0)
        if kind == 2:
            names = ("int64", "bool", "complex64", "float16", "float8_e5m2", "uint8", "float64")
            return tree.to(getattr(torch, chance.choice(names)))
        if kind == 3:
            return torch.full_like(tree, chance.choice((float("nan"), float("inf"), 1e38, 0)))
        if kind == 4:
            return tree.to_sparse() if tree.is_floating_point() else tree
        if kind == 5:
            return tree.reshape(-1)[:1].expand(chance.choice((10, 10**6)))
        return chance.choice(VALUES)
    if isinstance(tree, dict) and tree and chance.random() < 0.9:
        key = chance.choice(list(tree))
        if chance.random() < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        return {**tree, key: changed_state(tree[key], chance)}
    return chance.choice([value for value in VALUES if value != 10**400])
