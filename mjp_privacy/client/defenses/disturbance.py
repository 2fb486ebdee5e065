"""What a defence returns: the altered upload, and how large its error is publicly known to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import Grads

Deviations = Mapping[str, Tensor]
"""Standard deviation (n,) of the error on a parameter's entries, by name."""


@dataclass(frozen=True)
class Disturbed:
    """An altered upload, and the size of its error as recipe and upload alone reveal it.

    `noise` is on every entry. `rounding` leaves zero entries zero, so that a row without a
    gradient can still be recognised. Attacks are told both, and take an upload without them for
    exact.
    """

    sent: dict[str, Tensor]
    noise: Deviations = field(default_factory=dict)
    rounding: Deviations = field(default_factory=dict)
    unknown: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters, with (n,) bool each, whose error the upload does not tell; what is declared for
    them is a lower bound, and the privacy card says so."""

    def undeclared(self, before: Grads) -> dict[str, Tensor]:
        """By parameter, (n,) bool: it was changed, and its error is not declared or not known.

        before: the upload as the defence was given it
        """
        silent = {}
        for name, g in before.items():
            changed = (self.sent[name] != g).reshape(len(g), -1).any(1)
            nothing = torch.zeros(len(g), dtype=torch.float64, device=g.device)
            noise, rounding, unknown = (
                of.get(name, nothing).to(nothing)
                for of in (self.noise, self.rounding, self.unknown)
            )
            silent[name] = changed & ((noise + rounding == 0) | unknown.bool())
        return silent


@dataclass(frozen=True)
class Draws:
    """Normal numbers, drawn for (seed, the step's first image, round, parameter, purpose).

    They depend neither on the other images of a block nor on the level of the noise.
    """

    seed: int
    first_ids: Sequence[str]  # of each of the n steps
    round: int
    purpose: str = ""
    steps: int = 1  # local steps behind the upload, for a defence that scales by them

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Standard normal numbers (n, *shape) for a parameter.

        In float32, which is drawn four times as fast as float64.
        """
        named = [
            ("defense", self.purpose, self.seed, first, self.round, name)
            for first in self.first_ids
        ]
        drawn = [torch.randn(tuple(shape), generator=torch_generator(*names)) for names in named]
        return torch.stack(drawn)


def added(first: Deviations, second: Deviations) -> dict[str, Tensor]:
    """Standard deviations of the sum of two independent errors."""
    shared = first.keys() & second.keys()
    variances = {name: first[name].square() + second[name].square() for name in shared}
    return {**first, **second, **{name: variance.sqrt() for name, variance in variances.items()}}


def dropped_error(sparse: Tensor, threshold: Tensor) -> Tensor:
    """(n,) deviation of a tensor (n, ...) whose small entries became zero.

    threshold (n,): dropped entries are taken to lie uniformly below it
    """
    share = (sparse == 0).flatten(1).double().mean(1)
    return threshold.double() * (share / 3).sqrt()


def smallest_kept(flat: Tensor) -> Tensor:
    """(n,) the smallest magnitude of (n, k) that is not zero; 0 where all are zero."""
    least = torch.where(flat == 0, torch.inf, flat.abs()).amin(1)
    return torch.where(least.isfinite(), least, 0.0)


def per_step(values: Tensor, like: Tensor) -> Tensor:
    """One number for each step, (n,), in the shape and dtype to multiply `like` (n, ...)."""
    return values.to(like).view(-1, *[1] * (like.ndim - 1))


def squared_norm(grads: Grads) -> Tensor:
    """Squared norm (n,) of each step's gradient over all parameters, in float64."""
    return torch.stack([g.double().flatten(1).square().sum(1) for g in grads.values()]).sum(0)
