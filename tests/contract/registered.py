"""What is registered, and what lies in a folder without being registered.

A class that somebody wrote and forgot to register is found by its file, so that
`pytest tests/contract -k yours` names the step that is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from mjp_privacy.core.registry import Entry

ROOT = Path(__file__).resolve().parents[2]


def files_of(package: str) -> list[str]:
    """The modules in a package's folder itself, without private ones: files_of("attacks")."""
    folder = ROOT / package.replace(".", "/")
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def unregistered(
    package: str, file: str, entries: Iterable[Entry], members: Sequence[str]
) -> list[str]:
    """Classes of a file that have these members and that no entry names: "attacks.yours:Yours".

    None where an entry names the file wrongly, for then that is what is to be mended.
    """
    places = [entry.where.partition(":") for entry in entries]
    named = {attribute for module, _, attribute in places if module == f"{package}.{file}"}
    try:
        module = import_module(f"{package}.{file}")
    except Exception:
        if named:
            return []
        raise
    if named - vars(module).keys():
        return []
    classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass)]
    own = [cls for cls in classes if cls.__module__ == module.__name__ and _has(cls, members)]
    return [f"{module.__name__}:{cls.__name__}" for cls in own if cls.__name__ not in named]


def _has(cls: type, members: Sequence[str]) -> bool:
    return all(hasattr(cls, member) for member in members) and not inspect.isabstract(cls)
