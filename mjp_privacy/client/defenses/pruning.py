"""Magnitude pruning: each tensor keeps its largest entries, the others become zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mjp_privacy.client.defenses.disturbance import (
    Disturbed,
    Draws,
    dropped_error,
    smallest_kept,
)
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Grads


@dataclass(frozen=True)
class Prune:
    """Sends only each tensor's largest entries; the number is the share that is kept.

    `share`: counted in every tensor by itself, at least one entry; `top_k` counts over the whole
    upload, so that tensors with small entries lose all of theirs.
    """

    share: float
    name: ClassVar[str] = "prune"
    main: ClassVar[str | None] = "share"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(
                f"Defense prune.share: expected a share above 0 and up to 1, got {self.share:g}. "
                "0.1 keeps a tenth of each tensor's entries."
            )

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        """Prune every tensor of each step; the error lies below the smallest entry kept."""
        pruned = {name: self._pruned(g) for name, g in sent.items()}
        errors = {n: dropped_error(g, smallest_kept(g.flatten(1))) for n, g in pruned.items()}
        return Disturbed(pruned, rounding=errors)

    def _pruned(self, g: Tensor) -> Tensor:
        flat = g.flatten(1)
        kept = max(1, round(self.share * flat.shape[1]))
        places = flat.abs().topk(kept, dim=1, sorted=False).indices
        return torch.zeros_like(flat).scatter(1, places, flat.gather(1, places)).view_as(g)
