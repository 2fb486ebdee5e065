"""What was read or put together last, as much as fits: a report asks for the same scores often."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

BYTES = 128 << 20
"""What a report keeps: 300 metrics of 50,000 images, or all of a run with some thousand."""


class Recent:
    """Things by key; those asked for longest ago are forgotten when there is no room.

    Recent().get(("psnr", 3), lambda: read(3), lambda scores: scores.nbytes)
    """

    def __init__(self, room: int = BYTES) -> None:
        self.room = room
        self._things: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """What is kept under the key, or what `make` returns; `size`: its bytes."""
        if key in self._things:
            self._things.move_to_end(key)
            known: T = self._things[key][0]
            return known
        thing = make()
        bytes_of = size(thing)
        self._things[key] = thing, bytes_of
        self._size += bytes_of
        while self._size > self.room and len(self._things) > 1:
            _, (_, freed) = self._things.popitem(last=False)
            self._size -= freed
        return thing
