"""How long an attack may take over one image: a time that the attack itself looks at.

    with limited(30.0) as budget:      # who runs the attack
        attack.run(...)

    with image(index):                 # the attack, around its work on each of its images
        while better and not spent():  # and in its loops: past the time it gives what it has
            ...

The time is the processor's for this thread (`time.thread_time`): a busy machine, a sleeping one and
other threads do not count. Without `limited` nothing is ever spent. An attack that does not look
is stopped at its next call of torch once HARD times the time of its images has passed; what
calls torch never, such as a loop of NumPy's or a library's one long call, is not stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

HARD = 1.5
"""Times its time that an attack may take before it is stopped from outside."""
GRACE = 5.0
"""Seconds that an attack that looked has at least to put together what it has."""
SECONDS, OVER = "attack_seconds", "over_budget"
"""Diagnostics of images that were attacked with so much time: how much, and whether it ended them.
Which they are depends on the machine."""


@dataclass
class Budget:
    """The time of one call of an attack: `seconds` for each of its images."""

    seconds: float
    images: int = 1
    cut: set[int] = field(default_factory=set)
    """The images that the attack ended for lack of time."""
    _until: float = math.inf
    _last: float = math.inf
    _places: range = range(0)
    _used: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        now = time.thread_time()
        self._until = now + self.seconds * self.images
        self._last = now + HARD * self.seconds * self.images

    @contextmanager
    def image(self, first: int, number: int) -> Iterator[None]:
        """Work on these images, which share their time; it may come in several pieces."""
        before = self._until, self._last, self._places
        started = time.thread_time()
        began = started - self._used.get(first, 0.0)
        self._until = began + self.seconds * number
        self._last = began + HARD * self.seconds * number
        self._places = range(first, first + number)
        if self.cut.intersection(self._places):  # they were ended in an earlier piece
            self._last = max(self._last, before[1])
        try:
            yield
        finally:
            self._used[first] = self._used.get(first, 0.0) + time.thread_time() - started
            last = max(self._last, before[1]) if self.cut.intersection(self._places) else before[1]
            self._until, self._last, self._places = before[0], last, before[2]

    def spent(self) -> bool:
        """Whether the time of the present images has passed; who asks is taken to end them."""
        now = time.thread_time()
        if now < self._until:
            return False
        ended = set(self._places or range(self.images))
        if not ended <= self.cut:
            self.cut |= ended
            self._last = max(self._last, now + max(GRACE, self.seconds * len(ended)))
        return True

    def stop_if_long_over(self) -> None:
        """Raise OverBudget where an attack went on although its time had long passed."""
        if time.thread_time() > self._last:
            self.cut.update(range(self.images))
            raise OverBudget(self)


class OverBudget(Exception):
    """The attack took longer than it may, and offers nothing."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(over_budget(budget.seconds))
        self.budget = budget


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


def over_budget(seconds: float) -> str:
    """The reason in the rows of such images; the same on every machine."""
    return f"over budget: attack.seconds = {seconds:.12g}"


def spent() -> bool:
    """Whether the present image has had its time: an attack then gives what it has."""
    budget = _current.get()
    return budget is not None and budget.spent()


@contextmanager
def image(first: int, number: int = 1) -> Iterator[None]:
    """What an attack does for its image of this place, or for the `number` images of a client step
    from this place on; the time of an image is counted over all of these."""
    budget = _current.get()
    if budget is None:
        yield
        return
    with budget.image(first, number):
        yield


@contextmanager
def limited(seconds: float, images: int = 1) -> Iterator[Budget]:
    """Give what is done inside so much time for each image; OverBudget where it takes far more."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        """Looks at the clock at each call of torch."""

        def __torch_function__(
            self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
        ) -> Any:
            budget.stop_if_long_over()
            return func(*args, **(kwargs or {}))

    budget, gradients = Budget(seconds, images), torch.is_grad_enabled()
    token = _current.set(budget)
    try:
        with Watch():
            yield budget
    finally:
        torch.set_grad_enabled(gradients)  # it may have been stopped as it left `no_grad`
        _current.reset(token)
