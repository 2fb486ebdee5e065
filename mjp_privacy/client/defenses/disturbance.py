"""What a defence hands on: the altered upload, and the public part of what it did to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mjp_privacy.core.seeding import torch_generator
from mjp_privacy.interfaces import Grads

Deviations = Mapping[str, Tensor]
"""Standard deviation (n,) of the error on a parameter's entries, by name."""


@dataclass(frozen=True)
class Disturbed:
    """An altered upload and what anybody knows of its error from the recipe and the upload.

    `noise` is on every entry. `rounding` leaves entries that are zero at zero, so that a row
    without a gradient still shows.
    """

    sent: dict[str, Tensor]
    noise: Deviations = field(default_factory=dict)
    rounding: Deviations = field(default_factory=dict)


@dataclass(frozen=True)
class Draws:
    """Normal numbers for (seed, the step's first image, round, parameter, what they are for): they
    do not move with what else is in a block, nor with the level of the noise."""

    seed: int
    first_ids: Sequence[str]  # of each of the n steps
    round: int
    purpose: str = ""

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """(n, *shape) float32, which is drawn four times as fast as float64."""
        return torch.stack(
            [
                torch.randn(
                    tuple(shape),
                    generator=torch_generator(
                        "defense", self.purpose, self.seed, first, self.round, name
                    ),
                )
                for first in self.first_ids
            ]
        )


def added(one: Deviations, other: Deviations) -> dict[str, Tensor]:
    """Deviations of the sum of two independent errors."""
    both = {name: one[name].square() + other[name].square() for name in one.keys() & other.keys()}
    return {**one, **other, **{name: variance.sqrt() for name, variance in both.items()}}


def per_step(values: Tensor, like: Tensor) -> Tensor:
    """One number a step (n,), shaped to multiply `like` (n, ...)."""
    return values.to(like).view(-1, *[1] * (like.ndim - 1))


def squared_norm(grads: Grads) -> Tensor:
    """(n,) over all parameters, float64."""
    return torch.stack([g.double().flatten(1).square().sum(1) for g in grads.values()]).sum(0)


def entries(grads: Grads) -> int:
    """How many numbers one step uploads."""
    return sum(g[0].numel() for g in grads.values())
