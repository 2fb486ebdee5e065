"""From a complete spec to a network, with the card that says what it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import free_bytes
from mjp_privacy.models.adapters import with_adapters
from mjp_privacy.models.cards import ModelCard as ModelCard
from mjp_privacy.models.cards import WithCard
from mjp_privacy.models.checkpoints import CheckpointReport
from mjp_privacy.models.low_rank import low_rank
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.models.parameters import check_parameters
from mjp_privacy.models.spec import ModelSpec, check_sizes
from mjp_privacy.models.variant import Variant
from mjp_privacy.models.zoo import declared_normalisation

NEEDED = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")
OPTIONS = ("img_size", "num_heads", "mean", "std")  # that `mjp attack` has, for one's own model


class LoadedModel(WithCard, MJPVisionTransformer):
    """A plain ViT with its card."""


def check_complete(spec: ModelSpec, source: str) -> None:
    """Raise a UserError that says what is missing, unless the spec has all that a model needs."""
    needed = (*NEEDED, "mean", "std", "activation")
    missing = [key for key in needed if getattr(spec, key) is None]
    if missing:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in missing if key in OPTIONS)
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise UserError(
            f"{source}: {', '.join(missing)} cannot be read off the checkpoint and {are} never "
            f"guessed. Expected {', '.join(f'{key}=…' for key in missing)}, got none. Give {them} "
            "to load_model or in the model's part of the config"
            + (f", or to `mjp attack` as {options}." if options else ".")
            + _declared_pixels(spec.name, missing)
        )


def _declared_pixels(name: str, missing: Sequence[str]) -> str:
    """A sentence with the mean and std that timm declares for a model of this name, if it does."""
    declared = {key: value for key, value in declared_normalisation(name).items() if key in missing}
    if not declared:
        return ""
    stated = ", ".join(f"{key}={value}" for key, value in declared.items())
    return f" timm declares {stated} for {name}: give that if the client used it."


def build(spec: ModelSpec, source: str, *, classifies: bool = True) -> LoadedModel:
    """The network of a complete spec, with weights as torch draws them.

    classifies  whether a network without a head (num_classes 0) is refused
    """
    numbers = {key: getattr(spec, key) for key in NEEDED}
    check_sizes(spec.name, numbers)
    if classifies and not numbers["num_classes"]:
        raise UserError(f"{spec.name}: expected a head of 1 class or more, got num_classes=0.")
    eps = spec.variant.norm_eps
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 < eps <= 1:
        raise UserError(f"{spec.name}: norm_eps: expected a positive number, got {eps!r}.")
    size, patch = numbers["img_size"], numbers["patch_size"]
    width, heads = numbers["embed_dim"], numbers["num_heads"]
    if size % patch or width % heads:
        raise UserError(
            f"{spec.name}: expected img_size divisible by patch_size and embed_dim by num_heads, "
            f"got {size}/{patch} and {width}/{heads} ({source}: width {width}, patch {patch}; "
            f"config: img_size {size}, num_heads {heads}). Give sizes that fit the file, or leave "
            "them out."
        )
    ratio = spec.mlp_ratio or 4.0
    outline = torch.empty(0).is_meta  # it takes no memory
    free = None if outline else free_bytes(torch.device("cpu"))
    counted = {key: value for key, value in numbers.items() if key != "num_heads"}
    check_parameters(spec.name, **counted, mlp_ratio=ratio, free=free)
    model = LoadedModel(
        **numbers,
        mlp_ratio=ratio,
        position_embedding=spec.position_embedding,
        unknown_embedding=bool(spec.unknown_embedding),
        index_embedding=bool(spec.index_embedding),
        dal=spec.dal or "none",
        first_block=spec.first_block or "intact",
        variant=spec.variant,
    )
    return with_adapters(model, low_rank(spec.adapters), seed=0) if spec.adapters else model


def with_card(model: LoadedModel, spec: ModelSpec, report: CheckpointReport) -> LoadedModel:
    """The model in eval mode, with the card of this spec."""
    assert spec.mean is not None
    assert spec.std is not None
    plain = model.variant == Variant()
    model.card = ModelCard(
        name=spec.name,
        architecture=(
            f"vit d{spec.embed_dim} l{spec.depth} h{spec.num_heads} "
            f"p{spec.patch_size}@{spec.img_size}"
            + (" closed-form block 0" if model.first_block == "closed_form" else "")
            + str(model.variant)
        ),
        img_size=int(spec.img_size or 0),
        resize=spec.resize,
        interpolation=spec.interpolation or "bicubic",
        mean=spec.mean,
        std=spec.std,
        num_classes=int(spec.num_classes or 0),
        trained_gamma=spec.trained_gamma,
        checkpoint=report,
        norm_eps=None if plain else model.variant.norm_eps,
        activation=None if plain else model.variant.activation,
    )
    return model.eval()
