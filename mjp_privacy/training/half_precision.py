"""Whether bfloat16 pays on this CPU: without instructions for it a step takes far longer."""

from __future__ import annotations

import time

import torch

from mjp_privacy.training.config import TrainingConfig

WORTH_SAYING = 2.0
REPEATS = 3


def slow_bfloat16(config: TrainingConfig, device: torch.device) -> str | None:
    """A line for a training in bfloat16 on a CPU that computes it slower than float32, or None."""
    if config.recipe.precision != "bfloat16" or device.type != "cpu":
        return None
    times = bfloat16_times()
    if times < WORTH_SAYING:
        return None
    return (
        f"note: products of matrices take this CPU {times:.0f} times as long in bfloat16 as in "
        "float32; --precision float32, in another --out, is much faster and nearly the same recipe"
    )


def bfloat16_times() -> float:
    """How many times as long a product of matrices takes in bfloat16 as in float32."""
    left, right = torch.ones(256, 160), torch.ones(160, 640)
    return _seconds(left.bfloat16(), right.bfloat16()) / _seconds(left, right)


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    """The shortest of some repeats, the first of which warms up."""
    shortest = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        left @ right
        shortest = min(shortest, time.perf_counter() - began)
    return shortest
