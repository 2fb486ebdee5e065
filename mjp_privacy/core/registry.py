"""Names to things, looked up once, late and kindly."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from mjp_privacy.core.errors import UserError

T = TypeVar("T")


def unknown_name(kind: str, name: str, available: list[str]) -> UserError:
    """The error for a name nobody registered, with the nearest one that exists."""
    near = get_close_matches(name, available, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return UserError(f"Unknown {kind} {name!r}.{hint} Available: {', '.join(available) or 'none'}.")


class Registry(Generic[T]):
    """A dictionary whose misses suggest the nearest name and which refuses a silent overwrite."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise unknown_name(self.kind, name, self.names())
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def names(self) -> list[str]:
        return list(self._entries)
