"""The one table of attacks: what each needs, and the planted answer it must reach.

A new attack joins by one line. The victim is a tiny float64 ViT whose embedding can be inverted
(width above patch length), so arithmetic limits nothing: what is missed, the attack misses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AttackTarget:
    """`least` and `most`: bounds on the mean PSNR (dB, capped at 100) in each situation."""

    attack: str
    needs: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    unshuffled: float = 60.0  # setting a, plain model: at least
    shuffled: float = 60.0  # setting b, plain model: at least
    mjp: tuple[float, float] = (0.0, 100.0)  # setting b, model with E_unk: between
    mjp_only: bool = False  # not applicable to a model without E_unk

    def __str__(self) -> str:
        return "-".join([self.attack, *map(str, self.options.values())])


QKV = "blocks.0.attn.qkv.weight"

TARGETS = (
    AttackTarget("april", ("pos_embed", QKV), {"engine": "batched"}, mjp=(8.0, 13.0)),
    AttackTarget("april", ("pos_embed", QKV), {"engine": "breaching"}, mjp=(8.0, 13.0)),
    AttackTarget(
        "april_unk_aware",
        ("pos_embed", QKV, "unk_embed"),
        mjp=(11.0, 16.0),
        mjp_only=True,
    ),
)
