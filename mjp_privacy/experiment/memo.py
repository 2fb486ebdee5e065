"""Values that several cells of a block share: computed once, dropped with the block."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

RECENT = 2  # values kept of a name whose values are large


class Memo:
    """memo.once(("labels", ids), make) calls `make` the first time and then returns its value.

    A key must hold everything that the value depends on: a whole config, never parts of it. What a
    value computes from tensors can be kept under the tensors' contents:

        memo.once(("prediction", memo.content(images)), lambda: predict(model, images))
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._recent: dict[str, dict[Hashable, Any]] = {}
        self._contents: list[Tensor] = []

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of this key; `make` computes it if it is not there yet."""
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]

    def recent(self, name: str, key: Hashable, make: Callable[[], Any]) -> Any:
        """The same for values that are large: only the last two of a name are kept."""
        kept = self._recent.setdefault(name, {})
        value = kept.pop(key) if key in kept else make()
        kept[key] = value  # at the end, as the last one used
        while len(kept) > RECENT:
            del kept[next(iter(kept))]
        return value

    def content(self, tensor: Tensor | None) -> int:
        """A number that stands for a tensor's shape and values: equal tensors have the same one.
        The tensor must not be changed afterwards. None is -1."""
        if tensor is None:
            return -1
        for number, known in enumerate(self._contents):
            if known.dtype == tensor.dtype and torch.equal(known, tensor):
                return number
        self._contents.append(tensor)
        return len(self._contents) - 1

    def clear(self) -> None:
        """Forget all values and the tensors they are kept under."""
        self._values.clear()
        self._recent.clear()
        self._contents.clear()
