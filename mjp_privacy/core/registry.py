"""Things registered by name, imported when needed; a misspelt name gets the nearest real one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import first_of

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """Something that is imported only when it is used, so that listing names stays quick."""

    where: str  # "package.module:attribute"
    summary: str = ""  # one line for people; left out where the docstring's first line is it
    preset: Mapping[str, Any] = field(default_factory=dict)  # options that this name stands for

    def load(self) -> Any:
        name, _, attribute = self.where.partition(":")
        file = f"{name.replace('.', '/')}.py"
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and what it imports is not
            raise UserError(
                f"{self.where} is registered, but there is no file {file}. Write it, or mend the "
                "line that registers it."
            ) from error
        if hasattr(module, attribute):
            return getattr(module, attribute)
        raise UserError(
            f"{self.where} is registered, but {file} has no {attribute}."
            f"{did_you_mean(attribute, vars(module))} Mend the line that registers it."
        )


class Registry(dict[str, T]):
    """A dictionary by name: an unknown name is an error with a suggestion, a second entry of the
    same name is an error too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, name: str, entry: T) -> T:
        if name in self:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self[name] = entry
        return entry

    def __missing__(self, name: str) -> T:
        raise unknown_name(self.kind, name, self)


def did_you_mean(name: str, available: Iterable[str], otherwise: str = "") -> str:
    """A sentence to end an error message with, such as " Did you mean april?": the names that begin
    with this one, then those that hold it, else the nearest; a number at the end of a family's name
    may be another. `otherwise` where no name is near."""
    names = list(available)
    for part in (name, name.rstrip("0123456789")):
        holding = [other for other in names if len(part) > 2 and part in other]
        holding.sort(key=lambda other: not other.startswith(part))
        if near := holding or get_close_matches(part, names, n=1):
            return f" Did you mean {first_of(near, 6)}?"
    return otherwise


def unknown_name(kind: str, name: str, available: Iterable[str]) -> UserError:
    """The error for an unknown name; it suggests the nearest one and lists all that exist."""
    names = list(available)
    hint = did_you_mean(name, names)
    return UserError(f"Unknown {kind} {name!r}.{hint} Available: {', '.join(names) or 'none'}.")


def imported_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`, which imports the module of a name when it is first used:

    __getattr__ = imported_on_use(__name__, {"load_model": "mjp_privacy.models.loading"})
    """

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return attribute
