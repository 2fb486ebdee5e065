"""Values that several cells of a block share: computed once, dropped with the block."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class Memo:
    """memo.once(("labels", ids), make) calls `make` the first time and then returns its value.

    A key must hold everything that the value depends on: a whole config, never parts of it.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of this key; `make` computes it if it is not there yet."""
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
