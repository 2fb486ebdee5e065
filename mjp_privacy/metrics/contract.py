"""What every metric provides: its function, and which direction is better for privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


def arrow(higher_is_better: bool) -> str:
    """The arrow with which tables mark the direction that is better for the model owner."""
    return "↑" if higher_is_better else "↓"


class MetricFunction(Protocol):
    """Scores each reconstruction against its reference."""

    def __call__(self, reconstructions: Tensor, references: Tensor) -> Tensor:
        """(m, C, H, W) twice, float64 in [0, 1] -> (m,), without any average over images."""
        ...


@dataclass(frozen=True)
class Metric:
    """One score. `higher_is_better` means better for privacy, as with the paper's arrows."""

    name: str
    variant: Literal["paper", "standard"]
    higher_is_better: bool
    fn: MetricFunction
    summary: str = ""
