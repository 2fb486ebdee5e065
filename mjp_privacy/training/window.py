"""What a run measured since its last line of metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor


class Window:
    """Sums of the steps since the last line, kept on the device, and where the time went."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch, self.device = batch, device
        self.restart()

    def restart(self) -> None:
        self.total, self.steps = torch.zeros(5, device=self.device), 0
        self.started, self.waited = time.monotonic(), 0.0

    def timed(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches; the time spent on getting them is noted."""
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            self.waited += time.monotonic() - asked
            if batch is None:
                return
            yield batch

    def add(self, numbers: Tensor) -> None:
        self.total += numbers
        self.steps += 1

    def mean(self) -> Tensor:
        return self.total / self.steps

    def timing(self) -> dict[str, float]:
        """After `mean` was read, that is, once the device has done its work."""
        elapsed = max(time.monotonic() - self.started, 1e-9)
        return {
            "images_per_s": round(self.steps * self.batch / elapsed, 1),
            "seconds_per_step": elapsed / self.steps,
            "waiting": round(self.waited / elapsed, 4),
        }
