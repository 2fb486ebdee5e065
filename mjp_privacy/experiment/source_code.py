"""Which code makes a result: a digest of the source of an attack and of its client's defences.

    SourceReader().code_of("masked_span", ["top_k 0.1"]).files
        {"attacks/__init__.py (masked_span)": "83…",   its line in the registry
         "attacks/masked_span.py": "0f…",
         "attacks/equations/span.py": "c1…", …,        whatever it imports within attacks/
         "mjp_privacy/client/defenses/compression.py": "4d…", …}

Sources are read, never imported. Imports are followed within `attacks` and `client/defenses`, and
within the package of an attack or defence that stands elsewhere. How a source becomes a digest:
`normal_form`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attacks import ATTACKS, CONTROLS
from mjp_privacy.client.defenses.registry import DEFENSES
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.normal_form import normal_form

ATTACK_HOME = "attacks"
DEFENSE_HOME = "mjp_privacy.client.defenses"
NO_SOURCE = "no source"
"""In place of the digest of a module that has no file, such as a notebook's."""


@dataclass(frozen=True)
class SourceCode:
    """The code that makes a cell's results: the digest of each of its files, by name."""

    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """One digest of all files, which rows carry in their column `code`."""
        return _sha256(json.dumps(self.files, sort_keys=True))


@dataclass(frozen=True)
class _Module:
    """What a module's source says."""

    file: str  # its name in messages
    digest: str
    imports: Sequence[str]  # dotted names: of modules, or of what is taken from them


_READ: dict[str, tuple[object, _Module]] = {}
"""Modules by name, each with the state that it was read in."""


class SourceReader:
    """Reads sources for one command, each file once."""

    def __init__(self) -> None:
        self._codes: dict[tuple[str, ...], SourceCode] = {}
        self._files: dict[str, Path | None] = {}
        self._modules: dict[str, _Module] = {}

    def code_of(self, attack: str, defenses: Sequence[str] = ()) -> SourceCode:
        """The code of a registered attack or control, and of defences given as lines of text."""
        key = (attack, *defenses)
        if key not in self._codes:
            self._codes[key] = self._code_of(attack, defenses)
        return self._codes[key]

    def _code_of(self, attack: str, defenses: Sequence[str]) -> SourceCode:
        entry = (CONTROLS if attack in CONTROLS else ATTACKS)[attack]
        files = self._files_of(entry, ATTACK_HOME, f"attacks/__init__.py ({attack})")
        for name in [text.split()[0] for text in defenses]:
            line = f"mjp_privacy/client/defenses/registry.py ({name})"
            files |= self._files_of(DEFENSES[name], DEFENSE_HOME, line)
        return SourceCode(files)

    def _files_of(self, entry: Entry, home: str, line: str) -> dict[str, str]:
        """The files of a registered class; line: what its line in the registry is called."""
        registered = json.dumps([entry.where, dict(entry.preset)], sort_keys=True, default=str)
        reached = self._reached(entry.where.partition(":")[0], home)
        modules = [self._module(name) for name in reached]
        return {line: _sha256(registered), **{module.file: module.digest for module in modules}}

    def _reached(self, start: str, home: str) -> set[str]:
        """The names of this module and of all that it imports, directly or not, at `home` or in the
        package that it stands in itself."""
        rooms = {home, start.partition(".")[0]} - {"mjp_privacy"}
        reached: set[str] = set()
        pending = {start}
        while pending:
            reached.add(name := pending.pop())
            for target in self._module(name).imports:
                room = next((r for r in rooms if _is_in(target, r)), None)
                pending |= set() if room is None else self._run_by(target, room) - reached
        return reached

    def _run_by(self, target: str, room: str) -> set[str]:
        """The modules that importing a dotted name runs, within a room.

        `attacks.equations.span.combine` runs `attacks.equations.span` and `attacks.equations`. The
        room itself, such as the registry `attacks`, counts only where a name is taken from it.
        """
        while target != room and self._file(target) is None:
            target = target.rpartition(".")[0]
        names = {target}
        while target != room and (target := target.rpartition(".")[0]) != room:
            names.add(target)
        return {name for name in names if self._file(name) is not None}

    def _module(self, name: str) -> _Module:
        """A module's source. One that is imported counts as it was when it was first read: a file
        that is edited later does not change what this process runs."""
        if name not in self._modules:
            file = self._file(name)
            spec = getattr(sys.modules.get(name), "__spec__", None)
            state = spec if spec is not None else _stamp(file)
            known = _READ.get(name)
            if known is None or not (known[0] is state or (spec is None and known[0] == state)):
                known = _READ[name] = (state, _read(name, file))
            self._modules[name] = known[1]
        return self._modules[name]

    def _file(self, name: str) -> Path | None:
        """The source file of a module, found without importing it; None if there is none."""
        if name not in self._files:
            self._files[name] = self._find(name)
        return self._files[name]

    def _find(self, name: str) -> Path | None:
        if (module := sys.modules.get(name)) is not None:
            loaded = Path(getattr(module, "__file__", None) or "")
            return loaded if loaded.suffix == ".py" and loaded.is_file() else None
        package, _, last = name.rpartition(".")
        if not package:
            spec = importlib.util.find_spec(name)
            origin = Path((spec and spec.origin) or "")
            return origin if origin.suffix == ".py" and origin.is_file() else None
        for folder in self._folders(package):
            for file in (folder / f"{last}.py", folder / last / "__init__.py"):
                if file.is_file():
                    return file
        return None

    def _folders(self, package: str) -> list[Path]:
        """The folders that hold a package's modules."""
        if (paths := getattr(sys.modules.get(package), "__path__", None)) is not None:
            return [Path(path) for path in paths]
        file = self._file(package)
        return [file.parent] if file is not None and file.name == "__init__.py" else []


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _stamp(file: Path | None) -> tuple[str, int, int] | None:
    if file is None:
        return None
    stat = file.stat()
    return str(file), stat.st_mtime_ns, stat.st_size


def _read(name: str, file: Path | None) -> _Module:
    if file is None:
        return _Module(name, NO_SOURCE, ())
    is_package = file.name == "__init__.py"
    shown = name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
    source = file.read_bytes()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # half-edited: it cannot be the code that is running
        return _Module(shown, hashlib.sha256(source).hexdigest()[:16], ())
    package = name if is_package else name.rpartition(".")[0]
    return _Module(shown, _sha256(normal_form(tree)), tuple(_imports(tree, package)))


def _imports(node: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that a source imports, anywhere in it."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        above = parents[: len(parents) + 1 - node.level] if node.level else []
        module = [node.module] if node.module else []
        yield from (".".join([*above, *module, alias.name]) for alias in node.names)
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in _statements(node, part):
            yield from _imports(statement, package)


def _statements(node: ast.AST, part: str) -> Sequence[ast.AST]:
    held = getattr(node, part, ())
    return held if isinstance(held, list) else ()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
