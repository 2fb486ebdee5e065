"""What a metric is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


def arrow(higher_is_better: bool) -> str:
    """How tables write the direction that is better for the model owner."""
    return "↑" if higher_is_better else "↓"


class MetricFunction(Protocol):
    def __call__(self, reconstructions: Tensor, references: Tensor) -> Tensor:
        """(m, C, H, W) twice, float64 in [0, 1] -> (m,). Never averaged here."""
        ...


@dataclass(frozen=True)
class Metric:
    """One score. `higher_is_better` is for the model owner's privacy, as the paper's arrows."""

    name: str
    variant: Literal["paper", "standard"]
    higher_is_better: bool
    fn: MetricFunction
    summary: str = ""
