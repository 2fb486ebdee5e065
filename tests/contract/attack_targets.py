"""The one table of attacks: what each needs, and the planted answer it reaches.

A registered attack without a line here is held to `AttackTarget("yours", any_positions=None)`: all
of the picture without MJP, and pictures or a refusal with it. A line says more, or otherwise. The
client is a tiny float64 ViT whose embedding can be inverted (width above patch length), so
arithmetic limits nothing: what is missed, the attack misses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from attacks import ATTACKS

EXACT = 100.0
TOLERANCE = 1.0  # dB


@dataclass(frozen=True)
class AttackTarget:
    """What an attack reaches in each situation: mean PSNR in dB over the images, each capped at
    100, to TOLERANCE. Where None stands, any answer will do, but it must not break.

    An iterative attack names a smaller `model` and fewer `images`: its budget is seconds.
    """

    attack: str
    needs: tuple[str, ...] | Literal["all"] | None = None  # None: whatever its class says
    options: dict[str, Any] = field(default_factory=dict)
    unshuffled: float = EXACT  # setting a, plain model
    shuffled: float = EXACT  # setting b, plain model
    unmasked: float = EXACT  # setting a, model with E_unk
    mjp: float | None = None  # setting b, model with E_unk
    plain: bool = False  # under MJP it is scored against the plain image (c): several uploads
    nothing_under_mjp: bool = False  # every image masked: not applicable to any
    pictures: bool = True  # False: it names a mask only
    mjp_only: bool = False  # not applicable to a model without E_unk
    any_positions: bool | None = False  # applicable to a model without position embeddings
    any_batch: bool | None = None  # applicable to more than one image a step
    eight_bit: bool = False  # planted pixels are multiples of 1/255
    gamma: float = 0.27
    model: dict[str, Any] = field(default_factory=dict)
    images: int = 4

    def __str__(self) -> str:
        return "-".join([self.attack, *map(str, self.options.values())])


STATIONARY = {"prior": "stationary"}
PATCH = "patch_embed.proj.weight"
QKV = "blocks.0.attn.qkv.weight"
RECTANGLES = {"img_size": (40, 24)}
"""Of all targets whose `model` says nothing else."""
FOUR_PATCHES = {"img_size": 8, "depth": 1}
"""Of which MJP masks one of the first image's at gamma .5, and none at .27. The mean colour alone
scores 11.9 dB."""
LARGE_PATCHES = {"img_size": (48, 32), "patch_size": 8, "embed_dim": 208, "depth": 1}
"""24 patches of 192 pixels, of which MJP masks six: enough pixels for the lattice."""
MATCHING = {"steps": 100, "tv": 0.02, "decay": "cosine-decay", "step_size": 0.2}
ONLY_UNMASKED: dict[str, Any] = {"plain": True, "nothing_under_mjp": True, "any_batch": True}
EIGHT_BIT: dict[str, Any] = {
    **{"mjp": EXACT, "plain": True, "any_batch": False, "eight_bit": True},
    **{"model": LARGE_PATCHES, "images": 2},
}
OPTIMISED: dict[str, Any] = {"any_batch": True, "gamma": 0.5, "model": FOUR_PATCHES, "images": 1}
ALONE: dict[str, Any] = {"any_batch": False}
TABLE = ("pos_embed", PATCH)
APRIL = ("pos_embed", QKV)
MASKS = (*TABLE, QKV, "unk_embed")
ATTENDED = (PATCH, "patch_embed.proj.bias", "blocks.0.attn.proj.weight", "blocks.0.attn.proj.bias")
DEEPER = LARGE_PATCHES | {"depth": 2}
"""A last block shows the class token alone."""
GRADVIT = {"steps": 50, "seeds": 2, "step_size": 0.2, "tv": 0.02, "borders": 0.01}

LINES = (
    AttackTarget("april", APRIL, {"engine": "batched"}, mjp=10.3, **ALONE),
    AttackTarget(
        *("april", APRIL, {"engine": "breaching"}), mjp=10.3, model={"img_size": 32}, **ALONE
    ),
    AttackTarget("april_unk_aware", (*APRIL, "unk_embed"), mjp=12.6, mjp_only=True, **ALONE),
    AttackTarget("april_prior", (*APRIL, "unk_embed"), STATIONARY, mjp=13.1, **ALONE),
    AttackTarget("patch_gradient", TABLE, mjp=10.5, any_batch=True),
    AttackTarget("patch_prior", TABLE, STATIONARY, mjp=13.8, any_batch=True),
    AttackTarget("plain_step", TABLE, {"uploads": 2}, **ONLY_UNMASKED),
    AttackTarget("patch_jigsaw", TABLE, {"uploads": 2}, **ONLY_UNMASKED),
    AttackTarget("mask_locator", ("pos_embed",), pictures=False, any_batch=True),
    AttackTarget("masked_span", MASKS, STATIONARY, mjp=15.0, any_batch=True),
    AttackTarget("pixel_lattice", MASKS, STATIONARY, mjp_only=True, **EIGHT_BIT),
    AttackTarget("patch_lattice", ATTENDED, STATIONARY, any_positions=True, **EIGHT_BIT),
    AttackTarget(
        *("token_peeling", None, STATIONARY),
        **{"mjp": EXACT, "plain": True, "any_positions": True, "model": DEEPER, "images": 2},
    ),
    AttackTarget(
        *("multi_round", MASKS, {"uploads": 8, **STATIONARY}),
        **{"mjp": EXACT, "plain": True, "any_batch": True},
    ),
    AttackTarget("batch_span", MASKS, STATIONARY, mjp=15.0),
    AttackTarget(
        *("shared_picture", (*TABLE, "unk_embed"), {"uploads": 6, **STATIONARY}),
        **{"mjp": EXACT, "plain": True, "any_batch": False},
    ),
    AttackTarget("layer_span", None, STATIONARY, mjp=15.0),
    AttackTarget(  # it gives a picture's feature, and of its pixels next to nothing
        *("head_features", ("head.weight", "head.bias"), {"steps": 20, **STATIONARY}),
        **{"unshuffled": 10.4, "shuffled": 10.4, "unmasked": 10.4},
        **{"any_positions": True, "any_batch": True},
    ),
    AttackTarget("span_matching", "all", STATIONARY, mjp=15.0),
    AttackTarget("batch_lattice", None, STATIONARY, mjp=15.0),
    AttackTarget(
        "token_span", (PATCH, QKV), STATIONARY, mjp=15.0, model={"embed_dim": 160}, **ALONE
    ),
    AttackTarget(
        *("inverting_gradients", "all", MATCHING),
        **{"unshuffled": 16.9, "shuffled": 16.9, "unmasked": 20.8, "mjp": 21.1},
        **OPTIMISED | {"any_positions": True},
    ),
    AttackTarget(
        *("april_optimization", "all", MATCHING),
        **{"unshuffled": 18.7, "shuffled": 18.7, "unmasked": 24.1, "mjp": 24.5},
        **OPTIMISED,
    ),
    AttackTarget(
        *("gradvit", "all", {**GRADVIT, "image_prior": "stationary"}),
        **{"unshuffled": 13.7, "shuffled": 13.7, "unmasked": 17.3, "mjp": 17.2},
        **OPTIMISED | {"any_positions": True},
    ),
)


LISTED = {line.attack for line in LINES}
TARGETS = (*LINES, *(AttackTarget(n, any_positions=None) for n in ATTACKS if n not in LISTED))
