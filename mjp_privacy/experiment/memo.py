"""Things that several cells of a block need, each made once and dropped with the block."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class Memo:
    """memo.once(("labels", ids), make) calls `make` the first time and remembers what it gave.

    A key holds everything that the value depends on: a whole config, never a chosen part of it.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]
