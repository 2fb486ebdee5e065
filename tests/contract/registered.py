"""What lies in a folder without being registered: a class that somebody wrote and forgot to
register is found by its file, so that the tests of the contract name the step that is missing."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from mjp_privacy.core.registry import Entry

ROOT = Path(__file__).resolve().parents[2]


def unregistered(
    package: str, entries: Iterable[Entry], kinds: Iterable[Sequence[str]]
) -> list[str]:
    """Classes of a package's files that have the members of one of these kinds and that no entry
    names: "attacks.yours:Yours"."""
    named = {entry.where for entry in entries}
    found = []
    for path in sorted((ROOT / package.replace(".", "/")).glob("[!_]*.py")):
        module = import_module(f"{package}.{path.stem}")
        for name, cls in inspect.getmembers(module, inspect.isclass):
            complete = any(all(hasattr(cls, m) for m in members) for members in kinds)
            own = cls.__module__ == module.__name__ and not inspect.isabstract(cls)
            if own and complete and not getattr(cls, "_is_protocol", False):
                found.append(f"{module.__name__}:{name}")
    return [place for place in found if place not in named]
