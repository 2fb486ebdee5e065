"""What a defence returns: the altered upload, and how large its error is publicly known to be."""

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
    """An altered upload, and the size of its error as recipe and upload alone reveal it.

    `noise` is on every entry. `rounding` leaves zero entries zero, so that a row without a
    gradient can still be recognised.
    """

    sent: dict[str, Tensor]
    noise: Deviations = field(default_factory=dict)
    rounding: Deviations = field(default_factory=dict)


@dataclass(frozen=True)
class Draws:
    """Normal numbers, drawn for (seed, the step's first image, round, parameter, purpose).

    They depend neither on the other images of a block nor on the level of the noise.
    """

    seed: int
    first_ids: Sequence[str]  # of each of the n steps
    round: int
    purpose: str = ""

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Standard normal numbers (n, *shape) for a parameter.

        In float32, which is drawn four times as fast as float64.
        """
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


def added(first: Deviations, second: Deviations) -> dict[str, Tensor]:
    """Standard deviations of the sum of two independent errors."""
    shared = first.keys() & second.keys()
    variances = {name: first[name].square() + second[name].square() for name in shared}
    return {**first, **second, **{name: variance.sqrt() for name, variance in variances.items()}}


def per_step(values: Tensor, like: Tensor) -> Tensor:
    """One number for each step, (n,), in the shape and dtype to multiply `like` (n, ...)."""
    return values.to(like).view(-1, *[1] * (like.ndim - 1))


def squared_norm(grads: Grads) -> Tensor:
    """Squared norm (n,) of each step's gradient over all parameters, in float64."""
    return torch.stack([g.double().flatten(1).square().sum(1) for g in grads.values()]).sum(0)


def entries(grads: Grads) -> int:
    """How many numbers the upload of one step holds."""
    return sum(g[0].numel() for g in grads.values())
