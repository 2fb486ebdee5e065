"""What a run has measured since the last line of metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor


class Window:
    """Sums over the steps since the last line, kept on the device, and how the time was spent."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch, self.device = batch, device
        self.restart()

    def restart(self) -> None:
        """Forget all steps and start the clock again."""
        self.total, self.steps = torch.zeros(5, device=self.device), 0
        self.started, self.waited = time.monotonic(), 0.0

    def timed(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same batches; the time spent waiting for them is measured."""
        while True:
            asked_at = time.monotonic()
            batch = next(batches, None)
            self.waited += time.monotonic() - asked_at
            if batch is None:
                return
            yield batch

    def add(self, numbers: Tensor) -> None:
        """Add one step's measurements (5,)."""
        self.total += numbers
        self.steps += 1

    def mean(self) -> Tensor:
        """The mean over the steps, still on the device."""
        return self.total / self.steps

    def timing(self) -> dict[str, float]:
        """Speed and share of waiting. Call it after `mean` was read: then the device is done."""
        elapsed = max(time.monotonic() - self.started, 1e-9)
        return {
            "images_per_s": round(self.steps * self.batch / elapsed, 1),
            "seconds_per_step": elapsed / self.steps,
            "waiting": round(self.waited / elapsed, 4),
        }
