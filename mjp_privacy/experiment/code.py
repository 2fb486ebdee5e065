"""Which code, software and machine make a result: digests that rows carry, and what a run says of
it.

    SourceReader().code_of("masked_span", ["top_k 0.1"]).files
        {"attacks/__init__.py (masked_span)": "83…",   its line in the registry
         "attacks/masked_span.py": "0f…",
         "attacks/equations/span.py": "c1…", …,        whatever it imports within attacks/
         "mjp_privacy/client/defenses/published.py": "4d…", …}

Sources are read, never imported. Imports are followed within `attacks` and `client/defenses`, and
within the package of an attack or defence that stands elsewhere; models, client and metrics are
left out, because every cell has them in common.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from attacks import ATTACKS, CONTROLS
from mjp_privacy.client.defenses.registry import DEFENSES
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import commit
from mjp_privacy.core.registry import Entry

ATTACK_HOME = "attacks"
DEFENSE_HOME = "mjp_privacy.client.defenses"
NO_SOURCE = "no source"
"""In place of the digest of a module that has no file, such as a notebook's."""
VARYING = re.compile(r"(, )?\b\w+=(\[\]|Load\(\)|None)|, kind='u'")
"""What `ast.dump` writes in some versions of Python and not in others, or what changes nothing."""
PACKAGES = ("mjp-privacy", "torch", "timm", "breaching", "lpips", "scikit-image", "numpy", "pillow")

Stale = Literal["ask", "fresh", "keep"]
"""What to do with finished units of other code: stop and say so, make them again, keep them."""


@dataclass(frozen=True)
class SourceCode:
    """The code that makes a cell's results: the digest of each of its files, by name."""

    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """One digest of all files, which rows carry in their column `code`."""
        return _sha256(json.dumps(self.files, sort_keys=True))


class _Module(NamedTuple):
    file: str  # its name in messages
    digest: str
    imports: Sequence[str] = ()  # dotted names: of modules, or of what is taken from them

    @classmethod
    def read(cls, name: str, file: Path | None) -> _Module:
        if file is None:
            return cls(name, NO_SOURCE)
        is_package = file.name == "__init__.py"
        shown = name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
        source = file.read_bytes()
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # half-edited: it cannot be the code that is running
            return cls(shown, hashlib.sha256(source).hexdigest()[:16])
        imports: list[str] = []
        package = (name if is_package else name.rpartition(".")[0]).split(".")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imports += (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else []
                module = [node.module] if node.module else []
                imports += (".".join([*above, *module, alias.name]) for alias in node.names)
        return cls(shown, _sha256(normal_form(tree)), imports)


_READ: dict[str, tuple[object, _Module]] = {}
"""Imported modules by name, each with the `__spec__` that it had when it was read."""


class SourceReader:
    """Reads sources for one command, each file once."""

    def __init__(self) -> None:
        self._codes: dict[tuple[str, ...], SourceCode] = {}
        self._file, self._module = cache(self._find_file), cache(self._read_module)

    def code_of(self, attack: str, defenses: Sequence[str] = ()) -> SourceCode:
        """The code of a registered attack or control, and of defences given as lines of text."""
        key = (attack, *defenses)
        if key not in self._codes:
            registry = CONTROLS if attack in CONTROLS else ATTACKS
            files = self._files_of(registry[attack], ATTACK_HOME, f"attacks/__init__.py ({attack})")
            for name in [text.split()[0] for text in defenses]:
                line = f"mjp_privacy/client/defenses/registry.py ({name})"
                files |= self._files_of(DEFENSES[name], DEFENSE_HOME, line)
            self._codes[key] = SourceCode(files)
        return self._codes[key]

    def _files_of(self, entry: Entry, home: str, line: str) -> dict[str, str]:
        """The files of a registered class, and of all that it imports at `home` or in the package
        that it stands in itself; line: what its line in the registry is called."""
        start = entry.where.partition(":")[0]
        rooms = {home, start.partition(".")[0]} - {"mjp_privacy"}
        reached: set[str] = set()
        pending = {start}
        while pending:
            reached.add(name := pending.pop())
            for target in self._module(name).imports:
                within = (room for room in rooms if f"{target}.".startswith(f"{room}."))
                if room := next(within, ""):
                    pending |= self._run_by(target, room) - reached
        registered = json.dumps([entry.where, dict(entry.preset)], sort_keys=True, default=str)
        modules = [self._module(name) for name in reached]
        return {line: _sha256(registered), **{module.file: module.digest for module in modules}}

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

    def _read_module(self, name: str) -> _Module:
        """A module's source. One that is imported counts as it was when it was first read: a file
        that is edited later does not change what this process runs."""
        spec, known = getattr(sys.modules.get(name), "__spec__", None), _READ.get(name)
        if spec is None or known is None or known[0] is not spec:
            known = _READ[name] = (spec, _Module.read(name, self._file(name)))
        return known[1]

    def _find_file(self, name: str) -> Path | None:
        """The source file of a module, found without importing it; None if there is none."""
        package, module = name.rpartition(".")[0], sys.modules.get(name)
        origin = getattr(module, "__file__", None)
        if module is None:
            places = getattr(sys.modules.get(package), "__path__", None)
            if package and places is None:
                file = self._file(package)
                places = [str(file.parent)] if file and file.name == "__init__.py" else []
            origin = getattr(PathFinder.find_spec(name, places), "origin", None)
        file = Path(origin or "")
        return file if file.suffix == ".py" and file.is_file() else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def normal_form(tree: ast.AST) -> str:
    """A source as a text that is the same for sources that do the same: comments, docstrings and
    the way lines are broken do not count, and Python 3.10 to 3.13 agree.

    normal_form(ast.parse("a = 1  # one")) == normal_form(ast.parse("a=1"))
    """

    def does_nothing(statement: object) -> bool:
        alone = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return alone or isinstance(statement, ast.Pass)

    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, name, None), list):
                setattr(node, name, [s for s in statements if not does_nothing(s)])
        if isinstance(node, ast.JoinedStr):
            node.values = [v for v in node.values if getattr(v, "value", v) != ""]
    return VARYING.sub("", ast.dump(tree)).replace("(, ", "(")


# results of other code ----------------------------------------------------------------------------


def stale_choice(fresh: bool, keep: bool) -> Stale:
    """What the options --fresh and --keep of a command line stand for."""
    if fresh and keep:
        raise UserError(
            "Expected one of --fresh and --keep, got both: --fresh makes results of other code "
            "again, --keep keeps them. Leave one out."
        )
    return "fresh" if fresh else "keep" if keep else "ask"


def check_stale(stale: str) -> None:
    if stale not in get_args(Stale):
        known = ", ".join(map(repr, get_args(Stale)))
        raise UserError(f"Expected stale to be one of {known} (see run_experiment), got {stale!r}.")


def differences(made: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """What changed between two states of the code, in words.

    differences({"a.py": "1", "b.py": "2"}, {"a.py": "3"}) is ["a.py changed", "b.py removed"].
    made: None if it is not known, because no file of the cell says it any more.
    """
    if made is None:
        return ["which files is not known: no file of these rows says it"]
    words = {name: "added" for name in now if name not in made}
    words |= {name: "removed" for name in made if name not in now}
    words |= {name: "changed" for name in now if made.get(name, now[name]) != now[name]}
    return [f"{name} {words[name]}" for name in sorted(words)]


# software and machine -----------------------------------------------------------------------------


def provenance(device: torch.device) -> dict[str, str | int]:
    """Versions of the packages, the commit and the device."""
    facts: dict[str, str | int] = {name: version(name) for name in PACKAGES}
    facts["python"] = platform.python_version()
    facts["commit"] = commit()
    facts["device"] = platform.machine()
    if device.type == "cuda":  # workers elsewhere may have a GPU where none is here
        is_here = torch.cuda.is_available()
        facts["device"] = torch.cuda.get_device_name(device) if is_here else "cuda"
    return facts
