"""Defences that send fewer bits. None of them is random, and zero stays zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mjp_privacy.client.defenses.disturbance import Disturbed, Draws, entries, per_step
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Grads

UNIFORM = 1 / math.sqrt(12)  # standard deviation of an error that is uniform over a step
LARGEST, MANTISSA, SMALLEST = 65504.0, 10, -24  # of float16
HALF_NORMAL = math.sqrt(math.pi / 2 - 1)  # spread of |x| over its mean, x normal
LEVELS = 127  # of int8 on either side of zero


@dataclass(frozen=True)
class TopK:
    """The `share` of entries of largest magnitude over the whole upload; the others are zero."""

    share: float
    name: ClassVar[str] = "top_k"
    main: ClassVar[str | None] = "share"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(
                f"Defense top_k.share: expected a share above 0 and up to 1, got {self.share:g}. "
                "0.1 keeps a tenth of the entries."
            )

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        kept = max(1, round(self.share * entries(sent)))
        flat = torch.cat([g.flatten(1) for g in sent.values()], 1)
        places = flat.abs().topk(kept, dim=1, sorted=False).indices
        sparse = torch.zeros_like(flat).scatter(1, places, flat.gather(1, places))
        parts = sparse.split([g[0].numel() for g in sent.values()], 1)
        shaped = {
            name: part.unflatten(1, g.shape[1:])
            for (name, g), part in zip(sent.items(), parts, strict=True)
        }
        threshold = torch.where(sparse == 0, torch.inf, sparse.abs()).amin(1)
        threshold = torch.where(threshold.isfinite(), threshold, 0.0).double()
        return Disturbed(shaped, {}, {name: _dropped(g, threshold) for name, g in shaped.items()})


def _dropped(sparse: Tensor, threshold: Tensor) -> Tensor:
    """(n,): what is gone is anywhere below the smallest magnitude that was kept."""
    share = (sparse == 0).flatten(1).double().mean(1)
    return threshold * (share / 3).sqrt()


@dataclass(frozen=True)
class Float16:
    """Half precision; what is too large becomes the largest number there is."""

    name: ClassVar[str] = "float16"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        halves = {name: g.clamp(-LARGEST, LARGEST).half().to(g.dtype) for name, g in sent.items()}
        return Disturbed(halves, {}, {name: _half_step(g) for name, g in halves.items()})


def _half_step(half: Tensor) -> Tensor:
    """(n,): uniform over the distance of neighbouring numbers of half precision."""
    exponent = torch.frexp(half.double().abs().flatten(1)).exponent - 1
    step = torch.where(half.flatten(1) == 0, SMALLEST, (exponent - MANTISSA).clamp(min=SMALLEST))
    return UNIFORM * (4.0 ** step.double()).mean(1).sqrt()


@dataclass(frozen=True)
class Int8:
    """Each tensor in steps of its largest magnitude over 127, rounded to the nearest."""

    name: ClassVar[str] = "int8"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        steps = {name: g.flatten(1).abs().amax(1) / LEVELS for name, g in sent.items()}
        rounded = {}
        for name, g in sent.items():
            step = per_step(steps[name], g)
            rounded[name] = torch.where(step > 0, (g / step).round() * step, 0.0).nan_to_num(0.0)
        return Disturbed(
            rounded, {}, {name: UNIFORM * step.double() for name, step in steps.items()}
        )


@dataclass(frozen=True)
class Sign:
    """The sign of each entry times the tensor's mean magnitude."""

    name: ClassVar[str] = "sign"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        mean = {name: g.flatten(1).abs().mean(1) for name, g in sent.items()}
        signs = {name: g.sign() * per_step(mean[name], g) for name, g in sent.items()}
        return Disturbed(signs, {}, {name: HALF_NORMAL * m.double() for name, m in mean.items()})
