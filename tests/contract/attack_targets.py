"""The one table of attacks: what each needs, and the planted answer it reaches.

A registered attack without a line here is held to `AttackTarget("yours", any_positions=None)`: all
of the picture without MJP, and pictures or a refusal with it. A line says more, or otherwise. The
client is a tiny float64 ViT whose embedding can be inverted (width above patch length), so
arithmetic limits nothing: what is missed, the attack misses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import timm
import torch
from torch import Tensor

from attacks import ATTACKS
from mjp_privacy.metrics.pictures import quantise
from mjp_privacy.models import LoadedModel
from tests.helpers.models import planted_model
from tests.helpers.planted import cait, lattice_model, other_vit, relative, rotary

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
    AttackTarget(
        *("patch_integers", TABLE, STATIONARY),
        **{"plain": True, "nothing_under_mjp": True, "any_batch": False, "eight_bit": True},
        **{"model": LARGE_PATCHES | {"embed_dim": 20}, "images": 2},
    ),
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
    AttackTarget(  # more patches than the width; equal uploads of a plain client tell nothing new
        *("multi_round", MASKS, {"uploads": 9, **STATIONARY}),
        **{"mjp": EXACT, "plain": True, "any_batch": True, "unshuffled": 12, "unmasked": 12},
        **{"model": LARGE_PATCHES | {"embed_dim": 20}, "images": 2},
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


# other networks, batches and clients --------------------------------------------------------------


def as_they_are(images: Tensor) -> Tensor:
    return images


@dataclass(frozen=True)
class Situation:
    """An attack on planted pictures of another network or client, unshuffled, without labels.

    least, most  between which the PSNR of every picture lies, beside its best guess in its step
    says         what stands beside each picture
    batch        pictures in a step; 0: all are in one
    """

    name: str
    attack: str
    network: Callable[[], LoadedModel]
    images: int = 1
    least: float = 60.0
    most: float = float("inf")
    says: Mapping[str, float] = field(default_factory=lambda: {"certain": 1.0})
    batch: int = 0
    pictures: Callable[[Tensor], Tensor] = as_they_are
    client: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.attack}: {self.name}"


def losing_three_values() -> LoadedModel:
    """Its embedding does not see three values of a patch."""
    model = planted_model(img_size=16)
    with torch.no_grad():
        model.patch_embed.proj.weight[..., 0, 0] = 0
    return model


def changed_positions(change: Callable[[Tensor], Tensor], **more: Any) -> LoadedModel:
    """A network whose tables of relative positions were changed."""
    model = relative(**more)
    with torch.no_grad():
        for name, table in model.named_parameters():
            if "rel_pos" in name or "relative_position" in name:
                table.copy_(change(table))
    return model


def symmetric(table: Tensor) -> Tensor:
    return table + table.flip(0)


def repeated(images: Tensor) -> Tensor:
    return images[:1].repeat(len(images), 1, 1, 1)


def ending_blank(count: int) -> Callable[[Tensor], Tensor]:
    """The last pictures are of one colour: where there are no positions, all their patches are one
    token."""

    def change(images: Tensor) -> Tensor:
        images[-count:] = 0.75
        return images

    return change


def with_equal_corners(side: int) -> Callable[[Tensor], Tensor]:
    """So many pixels of the second picture are those of the first."""

    def change(images: Tensor) -> Tensor:
        images[1, :, :side, :side] = images[0, :, :side, :side]
        return quantise(images)

    return change


NOT_CERTAIN, FOUND = {"certain": 0.0}, {"certain": 1.0, "lattice_found": 1.0}
NOT_FOUND = {"certain": 0.0, "lattice_found": 0.0}
FROZEN = {"withhold": ("pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")}
PEELING, SPAN, LATTICE = "token_peeling", "layer_span", "batch_lattice"
BETWEEN_TWO_LAYERS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "gated": {"mlp_layer": timm.layers.GluMlp},
    "gated by a layer of its own": {"mlp_layer": timm.layers.SwiGLU},
    "behind an RMSNorm": {"norm_layer": timm.layers.RmsNorm},
    "normed": {"scale_mlp_norm": True},
}
BEFORE_BLOCK_0: dict[str, dict[str, Any]] = {
    "a norm of sums, as CLIP's": {"pre_norm": True},
    "a norm of patches, as AIMv2's": {"embed_norm_layer": timm.layers.RmsNorm},
}
KINDS: dict[str, dict[str, Any]] = {
    "layer scale": {},
    "registers": {"class_token": True, "reg_tokens": 2, "global_pool": "token"},
    "attention pooling": {"global_pool": "map"},
    "no layer scale, queries normed": {"init_values": None, "qk_norm": True},
}
IN_ORDER, NO_ORDER = {"order_found": 1.0}, {"order_found": 0.0}
BIAS: dict[str, Any] = {"rel_pos_type": "bias"}
small = partial(planted_model, img_size=16)
tokens = partial(planted_model, img_size=8, depth=3)
blank = partial(rotary, img_size=16, class_token=False, global_pool="avg")
scaled = partial(other_vit, class_token=True, global_pool="token")

SITUATIONS = (
    *(Situation(n, PEELING, partial(other_vit, **x), 1, 80) for n, x in BETWEEN_TWO_LAYERS.items()),
    *(
        Situation(f"{name}, {images}", PEELING, partial(other_vit, **more), images)
        for name, more in BEFORE_BLOCK_0.items()
        for images in (1, 2)
    ),
    Situation("a batch", PEELING, partial(small, embed_dim=160), 4, 80),
    Situation("a batch without a table", PEELING, rotary, 2, 80),
    Situation("a batch, relative positions", PEELING, relative, 2, 80),
    *(  # fewer tokens than the pictures have patches
        Situation(f"{n} of 4 blank", PEELING, blank, 4, 0, says=NOT_CERTAIN, pictures=change)
        for n, change in ((2, ending_blank(2)), (3, ending_blank(3)))
    ),
    Situation("frozen embedding", PEELING, small, 2, 100, client=FROZEN),
    *(  # a uniform grey: 12 dB
        Situation(name, PEELING, network, 1, 25, says=NOT_CERTAIN, client=FROZEN)
        for name, network in (
            ("narrow frozen embedding", partial(small, embed_dim=48)),
            ("frozen embedding that loses values", losing_three_values),
        )
    ),
    *(  # the network does not see an order
        Situation(
            f"{positions} positions",
            *(PEELING, partial(small, position_embedding=positions), 1, 0),
            says={"certain": 0.0, "patches_found": 1.0},
        )
        for positions in ("strict", "exposed")
    ),
    *(  # where borders tell no order, attention does
        Situation(name, "patch_lattice", network, 1, least, says=says, pictures=quantise)
        for name, network, least, says in (
            ("rotary positions", rotary, 60, IN_ORDER),
            ("relative positions", relative, 60, IN_ORDER),
            ("relative positions of an odd bias", partial(relative, **BIAS), 60, IN_ORDER),
            # the same for both directions: a picture is as good upside down
            ("symmetric ones", partial(changed_positions, symmetric, **BIAS), 0, NO_ORDER),
            # as they are before training: the network does not see an order
            ("zero ones", partial(changed_positions, torch.zeros_like), 0, NO_ORDER),
        )
    ),
    *(Situation(name, SPAN, partial(other_vit, **more), 2) for name, more in KINDS.items()),
    Situation("a batch", SPAN, tokens, 3, 80),
    Situation("no token is read, but whole pictures", SPAN, cait, 2, 80),
    Situation(  # other layers hold no noise, and they verify the pictures
        *("noise on the table", SPAN, partial(planted_model, embed_dim=192, patch_size=8), 2, 20),
        client={"position_noise": 1e-3},
    ),
    Situation(
        *("one picture over and over", "batch_span", tokens, 3, 100),
        says={"known_share": 1.0, "open_directions": 0.0},
        pictures=repeated,
    ),
    Situation("layer scale", "token_span", scaled, 4, says={}, batch=1),
    Situation(  # patches are longer than they are many
        *("wide", "token_span", partial(planted_model, patch_size=8, embed_dim=160), 4, 90),
        **{"says": {}, "batch": 1},
    ),
    *(  # each has tokens or biases of its own among the equations
        Situation(name, attack, partial(network, **{name: has}), 2, 99, says={}, batch=1)
        for name, has, network, attack in (
            ("distillation_token", True, small, "token_span"),
            ("patch_bias", False, small, "token_span"),
            ("qkv_bias", False, small, "token_span"),
            ("patch_bias", False, planted_model, "april"),
            ("patch_bias", False, planted_model, "april_prior"),
        )
    ),
    # directions are left to the prior
    Situation("narrow", "token_span", planted_model, 4, 11, 40, says={}, batch=1),
    *(  # without biases no patch is tested by itself: the likeliest are sorted and verified
        Situation(
            f"{images} by {batch}, biases of {biases}",
            *(LATTICE, partial(lattice_model, biases), images, 100),
            **{"says": FOUND, "batch": batch, "pictures": quantise},
        )
        for images, batch, biases in ((2, 2, 1e-4), (3, 3, 0.0), (4, 2, 0.1), (5, 5, 0.1))
    ),
    *(
        Situation(f"equal {side}", LATTICE, lattice_model, 2, 100, says={}, pictures=change)
        for side, change in ((8, with_equal_corners(8)), (16, with_equal_corners(16)))
    ),
    Situation("no grey levels", LATTICE, lattice_model, 2, 0, 100, says=NOT_FOUND),
)
