"""A call that goes on while the test does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """`with Background(lambda: attack(...)) as run: ...; run.result()`"""

    def __init__(self, call: Callable[[], T], seconds: float = 240) -> None:
        self.call, self.seconds = call, seconds
        self.answer: list[T] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.answer.append(self.call())
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Background[T]:
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.thread.join(self.seconds)

    def result(self) -> T:
        """What the call gave, or its error; a TimeoutError if it does not end."""
        self.thread.join(self.seconds)
        if self.thread.is_alive():
            raise TimeoutError(f"the call has not ended in {self.seconds:.0f} s")
        if self.error is not None:
            raise self.error
        return self.answer[0]
