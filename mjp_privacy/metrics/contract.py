"""What every metric provides: a measure of one pair of images, and which direction is better.

A measure works in two steps. `prepare` computes what it needs of the reference images alone, once;
`compare` then scores any number of reconstructions against them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

Variant = Literal["paper", "standard"]
Prepared = tuple[Tensor, ...]
"""What a measure keeps of the reference images. The first axis of every tensor is the image."""


def arrow(higher_is_better: bool) -> str:
    """The arrow with which tables mark the direction that is better for the model owner."""
    return "↑" if higher_is_better else "↓"


class Measure(Protocol):
    """A number for each pair of images. A frozen dataclass: equal ones are computed once.

    precision  float64: it is given few images at a time, so that they stay in the processor's
               cache. float32: a network, which is given many images at a time.
    """

    precision: ClassVar[torch.dtype]

    def prepare(self, references: Tensor) -> Prepared:
        """What `compare` needs of the references (m, C, H, W) in [0, 1] besides themselves."""

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """(m, C, H, W) twice in [0, 1] -> (m,), without any average over images."""


def unchanged(values: Tensor) -> Tensor:
    """The values of a measure as they are."""
    return values


@dataclass(frozen=True)
class Metric:
    """One score: a measure on the images of a variant, and what is made of its values.

    `higher_is_better` means better for privacy, as with the paper's arrows.
    """

    name: str
    variant: Variant
    higher_is_better: bool
    measure: Measure
    summary: str = ""
    finish: Callable[[Tensor], Tensor] = unchanged
