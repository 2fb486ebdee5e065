"""Changes of valid content: of bytes, and of trees as in JSON and YAML.

Every change is drawn from a `random.Random`, so that a seed repeats it.
"""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Callable, Sequence
from typing import Any

import yaml

Chance = random.Random
WORDS: Sequence[bytes] = (
    *(b"-1", b"0", b"1e999", b"NaN", b"-Infinity", b"9" * 400, b"1.5", b"null", b"true"),
    *(b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[2J", b"\r", b"\n", b'"', b"{", b"[", b"}", b","),
    *(b"&a ", b"*a", b"!!python/object:os.system ", b"<<: ", b"---\n", b": ", b"- ", b"? "),
    *(b"../", b"/dev/zero", b"file", b"label", b"__metadata__", b"data_offsets", b"F32", b"shape"),
    *(b"PK\x03\x04", b"PK\x01\x02", b"IHDR", b"IDAT", b"PAR1", b"\x80\x02", b"ctorch\n"),
)
NUMBERS = (0, 1, -1, 2, 7, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 10**30)
VALUES: Sequence[Any] = (
    *(None, True, False, *NUMBERS, -5, 0.5, -0.5, 1e30, 1e308, 10**400, math.nan, math.inf),
    *("", "x", "5", "nan", "x" * 300, "a\x1b[2Jb", "\ud800", "../..", "/dev/zero", "\0", "random"),
    *("timm:x", "packaged:x", "pos_embed", "float32", [], {}, [[]], [None], {"": 1}, [1, 2, 3]),
)


def changed_bytes(content: bytes, chance: Chance, others: Sequence[bytes] = ()) -> bytes:
    """Some bytes flipped, set, cut out, doubled, inserted or taken from another file."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5, 12))):
        _one_change(data, chance, others)
    return bytes(data)


def _one_change(data: bytearray, chance: Chance, others: Sequence[bytes]) -> None:
    size = len(data)
    reach = size if chance.random() < 0.5 else min(size, 400)  # headers stand first
    at = chance.randrange(reach) if reach else 0
    length = chance.choice((1, 2, 4, 8, 30, 300))
    kind = chance.randrange(9)
    if kind == 0 and size:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1 and size:
        data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    elif kind == 2:
        del data[at : at + length]
    elif kind == 3:
        data[at:at] = data[at : at + length] * chance.choice((1, 2, 20))
    elif kind == 4:
        data[at:at] = chance.choice(WORDS)
    elif kind == 5:
        word = chance.choice(WORDS)
        data[at : at + len(word)] = word
    elif kind == 6:
        width = chance.choice((2, 4, 8))
        number = chance.choice(NUMBERS) % (1 << 8 * width)
        order = chance.choice(("little", "big"))
        data[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
    elif kind == 7:
        del data[chance.randrange(size + 1) :]
    elif others:
        other = chance.choice(others)
        begin = chance.randrange(len(other) + 1)
        data[at : at + length] = other[begin : begin + chance.choice((8, 60, 600))]


def changed_tree(tree: Any, chance: Chance) -> Any:
    """A tree of mappings and lists in which some values, names or branches are others."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        tree = _one_node(tree, chance)
    return tree


def _one_node(tree: Any, chance: Chance) -> Any:
    if isinstance(tree, dict) and tree and chance.random() < 0.85:
        key = chance.choice(list(tree))
        kind = chance.random()
        if kind < 0.08:
            return {name: value for name, value in tree.items() if name != key}
        if kind < 0.16:
            return {
                _other_name(name, chance) if name == key else name: v for name, v in tree.items()
            }
        if kind < 0.22:
            return {**tree, _other_name(str(key), chance): chance.choice(VALUES)}
        return {**tree, key: _one_node(tree[key], chance)}
    if isinstance(tree, list) and tree and chance.random() < 0.7:
        at = chance.randrange(len(tree))
        kind = chance.random()
        if kind < 0.1:
            return tree[:at] + tree[at + 1 :]
        if kind < 0.2:
            return tree[:at] + [tree[at]] * chance.choice((2, 3, 60)) + tree[at:]
        return [*tree[:at], _one_node(tree[at], chance), *tree[at + 1 :]]
    return _other_value(tree, chance)


def _other_value(value: Any, chance: Chance) -> Any:
    kind = chance.random()
    if isinstance(value, bool) or kind < 0.5:
        return chance.choice(VALUES)
    if isinstance(value, int | float) and kind < 0.8:
        return value * chance.choice((-1, 2, 10**9))
    if isinstance(value, str) and value:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice(string.printable) + value[at:]
    if kind < 0.9:
        return [value]
    deep: Any = value
    for _ in range(chance.choice((2, 50, 2000))):
        deep = [deep]
    return deep


def _other_name(name: str, chance: Chance) -> str:
    return chance.choice(
        (f"{name}s", name[:-1], name.upper(), "", "x" * 600, f"{name}\x1b[2J", "0")
    )


def as_json(tree: Any, chance: Chance) -> bytes:
    """The tree as JSON, now and then with a field that is given twice."""
    try:
        text = json.dumps(tree, ensure_ascii=chance.random() < 0.5)
    except (RecursionError, ValueError):
        text = "[" * 3000
    if chance.random() < 0.05:
        text = text.replace("{", '{"label": 1, "label": 2, ', 1)
    return text.encode("utf-8", "surrogatepass")


def changed_json(content: bytes, chance: Chance, others: Sequence[bytes] = ()) -> bytes:
    """Another JSON file: half of them still JSON."""
    if chance.random() < 0.3:
        return changed_bytes(content, chance, others)
    return as_json(changed_tree(json.loads(content), chance), chance)


def changed_lines(content: bytes, chance: Chance, others: Sequence[bytes] = ()) -> bytes:
    """The same of a file with JSON in each line."""
    lines = content.splitlines()
    if chance.random() < 0.3 or not lines:
        return changed_bytes(content, chance, others)
    at = chance.randrange(len(lines))
    lines[at] = as_json(changed_tree(json.loads(lines[at]), chance), chance)
    if chance.random() < 0.2:
        lines.insert(chance.randrange(len(lines)), chance.choice(lines))
    return b"\n".join(lines) + b"\n" * chance.randrange(3)


def changed_yaml(content: bytes, chance: Chance, others: Sequence[bytes] = ()) -> bytes:
    """Another config."""
    if chance.random() < 0.3:
        return changed_bytes(content, chance, others)
    tree = changed_tree(yaml.safe_load(content), chance)
    try:
        return yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError):
        return as_json(tree, chance)


Change = Callable[[bytes, Chance, Sequence[bytes]], bytes]
