"""Defences that send fewer bits. None of them is random, and zero entries stay zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mjp_privacy.client.defenses.disturbance import (
    Disturbed,
    Draws,
    dropped_error,
    entries,
    per_step,
    smallest_kept,
)
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Grads

UNIFORM = 1 / math.sqrt(12)  # standard deviation of an error that is uniform over one step
LARGEST, MANTISSA, SMALLEST = 65504.0, 10, -24  # float16: top, mantissa bits, least exponent
HALF_NORMAL = math.sqrt(math.pi / 2 - 1)  # standard deviation of |x| over its mean, x normal
LEVELS = 127  # int8's levels on either side of zero


@dataclass(frozen=True)
class TopK:
    """Sends only the largest entries; the number is the share that is kept.

    `share`: counted over the whole upload, by magnitude; all other entries become zero.
    """

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
        """Keep the largest entries of each step's upload, at least one."""
        kept = max(1, round(self.share * entries(sent)))
        flat = torch.cat([g.flatten(1) for g in sent.values()], 1)
        places = flat.abs().topk(kept, dim=1, sorted=False).indices
        sparse = torch.zeros_like(flat).scatter(1, places, flat.gather(1, places))
        parts = sparse.split([g[0].numel() for g in sent.values()], 1)
        shaped = {
            name: part.unflatten(1, g.shape[1:])
            for (name, g), part in zip(sent.items(), parts, strict=True)
        }
        threshold = smallest_kept(sparse)
        return Disturbed(
            shaped, {}, {name: dropped_error(g, threshold) for name, g in shaped.items()}
        )


@dataclass(frozen=True)
class Float16:
    """Sends numbers in half precision (16 bits); takes no number.

    What is too large for it becomes its largest number, 65504.
    """

    name: ClassVar[str] = "float16"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        """Round every entry to float16; the dtype stays what it was."""
        halves = {name: g.clamp(-LARGEST, LARGEST).half().to(g.dtype) for name, g in sent.items()}
        return Disturbed(halves, {}, {name: _half_step(g) for name, g in halves.items()})


def _half_step(half: Tensor) -> Tensor:
    """(n,): the error is uniform over the distance between neighbouring float16 numbers."""
    exponent = torch.frexp(half.double().abs().flatten(1)).exponent - 1
    step = torch.where(half.flatten(1) == 0, SMALLEST, (exponent - MANTISSA).clamp(min=SMALLEST))
    return UNIFORM * (4.0 ** step.double()).mean(1).sqrt()


@dataclass(frozen=True)
class Int8:
    """Rounds each tensor to 255 even levels (8 bits); takes no number.

    A level is the tensor's largest magnitude over 127; entries go to the nearest level.
    """

    name: ClassVar[str] = "int8"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        """Round every entry to the levels of its tensor; an all-zero tensor stays zero."""
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
    """Sends each entry's sign times its tensor's mean size; takes no number."""

    name: ClassVar[str] = "sign"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        """Replace every entry by its sign times the mean magnitude of its tensor."""
        mean = {name: g.flatten(1).abs().mean(1) for name, g in sent.items()}
        signs = {name: g.sign() * per_step(mean[name], g) for name, g in sent.items()}
        return Disturbed(signs, {}, {name: HALF_NORMAL * m.double() for name, m in mean.items()})
