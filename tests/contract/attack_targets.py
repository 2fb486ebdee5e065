"""The one table of attacks: what each needs, and the planted answer it must reach.

A new attack joins by one line. The victim is a tiny float64 ViT whose embedding can be inverted
(width above patch length), so arithmetic limits nothing: what is missed, the attack misses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AttackTarget:
    """Bounds on the PSNR (dB, capped at 100) in each situation.

    An iterative attack names a smaller `model` and fewer `images`: its budget is seconds.
    """

    attack: str
    needs: tuple[str, ...] | None  # None: every parameter
    options: dict[str, Any] = field(default_factory=dict)
    unshuffled: float = 60.0  # setting a, plain model: at least
    shuffled: float = 60.0  # setting b, plain model: at least
    mjp: tuple[float, float] = (0.0, 100.0)  # model with E_unk, shuffled: between
    plain: bool = False  # under MJP it is scored against the plain image (c): several uploads
    nothing_under_mjp: bool = False  # every image masked: not applicable to any
    pictures: bool = True  # False: it names a mask only
    mjp_only: bool = False  # not applicable to a model without E_unk
    any_positions: bool = False  # applicable to a model without position embeddings
    any_batch: bool = False  # applicable to more than one image a step
    model: dict[str, Any] = field(default_factory=dict)
    images: int = 4

    def __str__(self) -> str:
        return "-".join([self.attack, *map(str, self.options.values())])


STATIONARY = {"prior": "stationary"}
PATCH = "patch_embed.proj.weight"
SMALL = {"img_size": 8, "depth": 1}
"""Four patches, of which b masks one; its mean colour alone scores 11.9 dB."""
MATCHING = {"steps": 100, "tv": 0.02, "decay": "cosine-decay", "step_size": 0.2}
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
    AttackTarget("april_prior", ("pos_embed", QKV, "unk_embed"), STATIONARY, mjp=(12.0, 18.0)),
    AttackTarget("patch_gradient", ("pos_embed", PATCH), mjp=(6.0, 14.0), any_batch=True),
    AttackTarget("patch_prior", ("pos_embed", PATCH), STATIONARY, mjp=(11.0, 18.0), any_batch=True),
    AttackTarget(
        "plain_step",
        ("pos_embed", PATCH),
        {"uploads": 2},
        plain=True,
        nothing_under_mjp=True,
        any_batch=True,
    ),
    AttackTarget("mask_locator", ("pos_embed",), pictures=False, any_batch=True),
    AttackTarget(
        "masked_span", ("pos_embed", PATCH, QKV), STATIONARY, mjp=(14.0, 30.0), any_batch=True
    ),
    AttackTarget(
        "pixel_lattice",  # the planted pixels are no multiples of 1/255: as good as masked_span
        ("pos_embed", PATCH, QKV, "unk_embed"),
        STATIONARY,
        mjp=(14.0, 30.0),
        mjp_only=True,
    ),
    AttackTarget(
        "multi_round",
        ("pos_embed", PATCH, QKV),
        {"uploads": 8, **STATIONARY},
        plain=True,
        mjp=(60.0, 100.0),
        any_batch=True,
    ),
    AttackTarget(
        "token_span", (PATCH, QKV), STATIONARY, model={"embed_dim": 160}, mjp=(14.0, 30.0)
    ),
    AttackTarget(
        "inverting_gradients",
        None,
        MATCHING,
        unshuffled=15.0,
        shuffled=15.0,
        mjp=(18.0, 60.0),
        any_positions=True,
        any_batch=True,
        model=SMALL,
        images=1,
    ),
    AttackTarget(
        "april_optimization",
        None,
        MATCHING,
        unshuffled=17.0,
        shuffled=17.0,
        mjp=(21.0, 60.0),
        any_batch=True,
        model=SMALL,
        images=1,
    ),
)
