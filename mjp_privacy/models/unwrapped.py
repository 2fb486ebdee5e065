"""Finds the weights in what a file holds: inside `model` or `state_dict`, behind `module.`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from mjp_privacy.core.read import FileKind
from mjp_privacy.core.text import shown
from mjp_privacy.models.layouts import LAYOUTS
from mjp_privacy.models.tensor_files import MOST_AXES, MOST_NAME

NESTED_KEYS = ("model", "state_dict", "module")
PREFIX = re.compile(r"(?:model\.|module\.|_orig_mod\.)*")
ANCHOR = "patch_embed.proj.weight"  # every ViT has it, in its layout's words
MOST_TENSORS = 10_000  # the largest Vision Transformers have one or two thousand
MOST_NUMBER = 10**9  # of an entry that has a number for its name


def unwrapped(
    content: Mapping[Any, Any], path: Path, kind: FileKind
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights of a file by their bare names, and the names of all else that it holds.

    path, kind: the file that the content was read from, for messages
    """
    beside: list[str] = []
    for _ in NESTED_KEYS:
        key = next((k for k in NESTED_KEYS if isinstance(content.get(k), Mapping)), None)
        if key is not None:
            beside += [_name_of(name) for name in content if name != key]
            content = content[key]
    if len(content) > MOST_TENSORS:
        raise kind.refusal(path, f"{len(content)} entries, more than {MOST_TENSORS}")
    entries = {_name_of(name): value for name, value in content.items()}
    if len(entries) < len(content):
        raise kind.refusal(path, "several entries of one name")
    prefix = next((prefix for prefix in map(_prefix, entries) if prefix is not None), "")
    beside += [name for name in entries if not name.startswith(prefix)]
    entries = {n.removeprefix(prefix): v for n, v in entries.items() if n.startswith(prefix)}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    beside += [name for name in entries if name not in tensors]
    for name, tensor in tensors.items():
        if tensor.ndim > MOST_AXES:
            raise kind.refusal(path, f"a tensor of {tensor.ndim} axes", name)
    return tensors, tuple(sorted(beside))


def _name_of(key: object) -> str:
    """An entry's name; of a key that is no name, its kind."""
    if isinstance(key, str):
        return shown(key, MOST_NAME)
    return str(key) if isinstance(key, int) and abs(key) < MOST_NUMBER else type(key).__name__


@lru_cache(maxsize=MOST_TENSORS)  # a run opens the same file several times
def _prefix(name: str) -> str | None:
    """What stands before the patch embedding's weight, in any layout; None for other names."""
    prefix = PREFIX.match(name)[0]  # type: ignore[index]
    bare = name.removeprefix(prefix)
    return prefix if any(ANCHOR in layout.own_names(bare) for layout in LAYOUTS) else None
