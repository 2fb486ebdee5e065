"""Config files in YAML: read without executing anything, with a clear message for each mistake.

A few lines of anchors can stand for a billion fields, so what they stand for is counted before it
is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.gate.file_kind import FileKind, NoFile
from mjp_privacy.core.registry import nearest
from mjp_privacy.core.shown import shown

CONFIG = FileKind("a YAML file with fields such as `name:`", "Start from one in configs/.", 1 << 18)

NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
ODD = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-9_.]+)+)")
"""Whole numbers that begin with a zero, and numbers of base 60."""

MOST_NODES = 50_000
"""Fields and values of a file, each counted as often as anchors repeat it."""


class _Loader(yaml.SafeLoader):
    """Plain values only; `1e-3` is a number, as in YAML 1.2 and everywhere else."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The top-level fields of a YAML file; a field that is given twice is an error."""
    try:
        text = CONFIG.text(path)
    except NoFile as error:
        raise UserError(_no_config(path)) from error
    content = yaml_value(text, shown(path))
    if not isinstance(content, Mapping):
        got = "an empty file" if content is None else type(content).__name__
        raise CONFIG.refusal(path, got)
    return content


def yaml_value(text: str, where: str) -> Any:
    """The value of a YAML text; `where` names it in messages: yaml_value("[1, 2]", "--values")."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_too_many(node, where)
            repeated = _repeated_key(node, set())
            if repeated is not None:
                raise UserError(
                    f"{where}, line {repeated.start_mark.line + 1}: {shown(repeated.value)!r} is "
                    "given twice in one mapping. Expected each field and model once; YAML would "
                    "drop the first."
                )
            _refuse_odd_numbers(node, where)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except UserError:
        raise
    except Exception as error:  # YAMLError, and what its constructors raise on odd values
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where} is not valid YAML: {shown(said)}") from error


def _refuse_odd_numbers(root: yaml.Node, where: str) -> None:
    """Refuse numbers that YAML 1.1 reads as no reader would: 010 as 8, and 1:30 as 90."""
    left, seen = [root], set[int]()
    while left:
        node = left.pop()
        if isinstance(node, yaml.ScalarNode):
            if node.style is None and node.tag in NUMBERS and ODD.fullmatch(node.value):
                raise UserError(
                    f"{where}, line {node.start_mark.line + 1}: expected a number as 10 or 0.5, or "
                    f"a text in quotes; got {shown(node.value, 60)}, which YAML takes for a number "
                    "of another base. Write it without leading zeros and colons, or in quotes."
                )
        elif id(node) not in seen:
            seen.add(id(node))
            parts = [part for part in node.value if isinstance(part, yaml.Node)]
            left += parts or [part for pair in node.value for part in pair]


def _no_config(path: Path) -> str:
    folder = path.parent
    neighbours = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
    near = nearest(path.name, neighbours)
    hint = "" if near is None else f" Did you mean {folder / near}?"
    shipped = "Those shipped are in configs/ of the repository."
    return f"No config at {shown(path)}: expected a YAML file.{hint} {shipped}"


def _refuse_too_many(root: yaml.Node, where: str) -> None:
    """Count what the anchors of a file stand for, without building it."""
    if _count(root, {}, set()) > MOST_NODES:
        raise UserError(
            f"{where}: expected at most {MOST_NODES} fields and values, each counted as often as "
            "anchors (&name, *name) repeat it; got more. Write a shorter config without anchors."
        )


def _count(node: yaml.Node, counted: dict[int, int], above: set[int]) -> int:
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in above:
        raise ValueError("an anchor that holds itself")
    if id(node) not in counted:
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        inside = above | {id(node)}
        counted[id(node)] = 1 + sum(_count(part, counted, inside) for part in parts)
    return counted[id(node)]


def _repeated_key(node: yaml.Node | None, seen: set[int]) -> yaml.ScalarNode | None:
    """The first key that a mapping under `node` holds twice, or None.

    seen: ids of the nodes visited so far, because an anchor makes one node appear several times.
    """
    if node is None or id(node) in seen or isinstance(node, yaml.ScalarNode):
        return None
    seen.add(id(node))
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, n) for n in node.value]
    keys: set[str] = set()
    for key, value in pairs:
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                return key
            keys.add(key.value)
        repeated = _repeated_key(value, seen)
        if repeated is not None:
            return repeated
    return None
