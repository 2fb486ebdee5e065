"""Whether bfloat16 pays on this CPU: without instructions for it a step takes far longer."""

from __future__ import annotations

import time

import torch

from mjp_privacy.training.config import TrainingConfig

WORTH_SAYING = 4.0
"""Products of matrices that take so many times as long; on CPUs without instructions it is more
than 30, and a step of the zoo's model 12."""
REPEATS = 5


def slow_bfloat16(config: TrainingConfig, device: torch.device) -> str | None:
    """A line for a training in bfloat16 on a CPU that computes it far slower than float32."""
    if config.recipe.precision != "bfloat16" or device.type != "cpu":
        return None
    if bfloat16_times() < WORTH_SAYING:
        return None
    return (
        "note: this CPU multiplies matrices far slower in bfloat16 than in float32; with "
        "--precision float32, in another --out, steps take a fraction of the time"
    )


def bfloat16_times() -> float:
    """How many times as long a product of matrices takes in bfloat16 as in float32."""
    left, right = torch.ones(256, 160), torch.ones(160, 640)
    return shortest(left.bfloat16(), right.bfloat16()) / shortest(left, right)


def shortest(left: torch.Tensor, right: torch.Tensor) -> float:
    """Seconds of the fastest of some products: others may wait for other processes."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return min(seconds)
