"""Config files in YAML: read without executing anything, with a clear message for each mistake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import nearest


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The top-level fields of a YAML file; a field that is given twice is an error."""
    if not path.is_file():
        raise UserError(_no_config(path))
    content = _read_yaml(path)
    if not isinstance(content, Mapping):
        raise UserError(
            f"{path}: expected fields such as `name:`; got {type(content).__name__}. Start from a "
            "file in configs/."
        )
    return content


def _no_config(path: Path) -> str:
    folder = path.parent
    neighbours = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
    near = nearest(path.name, neighbours)
    hint = "" if near is None else f" Did you mean {folder / near}?"
    got = "No config at" if not path.is_dir() else "This is a folder:"
    shipped = "Those shipped are in configs/ of the repository."
    return f"{got} {path}: expected a YAML file.{hint} {shipped}"


def _read_yaml(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        repeated = _repeated_key(yaml.compose(text, Loader=yaml.SafeLoader), set())
        if repeated is not None:
            raise UserError(
                f"{path}, line {repeated.start_mark.line + 1}: {repeated.value!r} is given twice "
                "in one mapping. Expected each field and model once; YAML would drop the first."
            )
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, bad date
        raise UserError(f"{path} is not valid YAML: {error}") from error
    except OSError as error:
        raise UserError(f"Expected a readable config at {path}, got: {error.strerror}.") from error


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
