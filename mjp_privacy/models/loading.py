"""`load_model`: from a model's name or a file of weights to a network and a card describing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.seeding import derive_seed
from mjp_privacy.models.beside import with_facts_beside
from mjp_privacy.models.checkpoint_files import (
    TIMM_PREFIX,
    WeightFile,
    download_timm,
    read_weight_file,
)
from mjp_privacy.models.checkpoint_tables import UnknownInit
from mjp_privacy.models.checkpoints import (
    CheckpointReport,
    layout_of,
    load_into,
    shape_of,
    to_own_names,
)
from mjp_privacy.models.mismatch import check_same_model
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.models.spec import (
    ModelSpec,
    at_size,
    check_choice,
    completed,
    filled,
    overridden,
    with_metadata,
)
from mjp_privacy.models.variant import Variant
from mjp_privacy.models.zoo import declared_normalisation, spec_by_name, timm_spec

RANDOM = "random"
NEEDED = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")
OPTIONS = ("img_size", "num_heads", "mean", "std")  # that `mjp attack` has, for one's own model


@dataclass(frozen=True)
class ModelCard:
    """The facts about a loaded model that table rows state."""

    name: str
    architecture: str
    img_size: int
    resize: int | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    trained_gamma: float | None
    checkpoint: CheckpointReport
    norm_eps: float | None = None  # stated, with the activation, of a network other than timm's
    activation: str | None = None


class LoadedModel(MJPVisionTransformer):
    """The network, with the card that says where it came from and how images are normalised."""

    card: ModelCard

    def normalize(self, images: Tensor) -> Tensor:
        """Images in [0, 1] -> the normalised input of the network."""
        mean = _per_channel(self.card.mean, images)
        std = _per_channel(self.card.std, images)
        return (images - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        """The inverse of `normalize`; values outside [0, 1] are not clipped."""
        mean = _per_channel(self.card.mean, x)
        std = _per_channel(self.card.std, x)
        return x * std + mean


def _per_channel(numbers: tuple[float, ...], like: Tensor) -> Tensor:
    """(C, 1, 1), made in the precision of `like`: float64 numbers must not pass through float32."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(-1, 1, 1)


def load_model(
    name: str | None = None,
    *,
    checkpoint: str | Path | None = None,
    unknown_init: UnknownInit | None = None,
    seed: int = 0,
    **overrides: Any,
) -> LoadedModel:
    """A model in eval mode on the CPU, in float32, with its `card`: load_model("cifar_vit").

    name         a named model (`deit_small_mjp`, ...) or a plain timm ViT
                 (`vit_tiny_patch16_224`, `vit_base_patch16_224.augreg_in21k_ft_in1k`).
                 Without a name the architecture is read off the checkpoint. `num_heads`, `mean`
                 and `std` do not show in tensors: they are taken from the file's metadata or the
                 JSON files beside it (`models.beside`), or must be given.
    checkpoint   a file (.safetensors, .pth, .pt, .bin) in one of the layouts of models/README.md,
                 a folder as timm, transformers and open_clip save one, `timm:NAME` for a download,
                 or `random` for seeded untrained weights.
    overrides    fields of `ModelSpec`: img_size, patch_size, embed_dim, depth, num_heads,
                 num_classes, mean, std, position_embedding, unknown_embedding, dal, ...
    unknown_init how to fill E_unk if the checkpoint has none; the card's notes say so.
    """
    check_choice("unknown_init", unknown_init, UnknownInit)
    spec, source = asked_for(name, checkpoint, overrides)
    if source == RANDOM:
        return _random_model(spec, seed)
    if source.startswith(TIMM_PREFIX):
        spec = declared_by_timm(spec, source)
        file = download_timm(source.removeprefix(TIMM_PREFIX))
    else:
        file = read_weight_file(source)
    named, source = spec, file.shown
    spec, state = read_off(named, file, overrides)
    check_complete(spec, source)
    check_same_model(named, shape_of(state, source), source)
    model = build(spec, source)
    report = load_into(model, state, file, unknown_init=unknown_init)
    return with_card(model, spec, report)


def asked_for(
    name: str | None, checkpoint: str | Path | None, overrides: Mapping[str, Any]
) -> tuple[ModelSpec, str]:
    """The spec of a name with the user's fields in it, and where its weights come from."""
    spec = overridden(spec_by_name(name) if name else ModelSpec("custom"), overrides)
    source = str(checkpoint) if checkpoint is not None else spec.checkpoint
    if source is None:
        raise UserError(
            f"Model {spec.name!r} needs a checkpoint. {spec.where or 'Give checkpoint=PATH.'} "
            "On the command line: --weights PATH. checkpoint='random' builds it untrained."
        )
    if source == RANDOM:  # no file says what the blocks compute: the plain ViT's
        spec = filled(spec, {"activation": Variant().activation})
    return spec, source


def declared_by_timm(spec: ModelSpec, source: str) -> ModelSpec:
    """The spec, its open fields taken from what timm declares for `timm:NAME`."""
    declared = timm_spec(source.removeprefix(TIMM_PREFIX))
    return filled(spec, vars(at_size(declared, spec.img_size)))


def read_off(
    spec: ModelSpec, file: WeightFile, overrides: Mapping[str, Any]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The spec with what a file says, and the file's tensors by this model's names.

    What the user gave wins over the file's metadata, and these over the JSON files beside it. The
    tensors' values are not read.
    """
    state, layout = to_own_names(file.tensors), layout_of(file.tensors)
    shape = shape_of(state, file.shown)
    spec = with_facts_beside(spec, file.path, layout, shape)
    spec = overridden(with_metadata(spec, file), overrides)
    return completed(spec, shape, layout), state


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
    least = dict.fromkeys(NEEDED, 1) | {"num_classes": int(classifies)}
    wrong = [f"{k}={v!r}" for k, v in numbers.items() if not isinstance(v, int) or v < least[k]]
    if wrong:
        raise UserError(f"{spec.name}: expected whole numbers from 1, got {', '.join(wrong)}.")
    eps = spec.variant.norm_eps
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not eps > 0:
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
    return LoadedModel(
        **numbers,
        mlp_ratio=spec.mlp_ratio or 4.0,
        position_embedding=spec.position_embedding,
        unknown_embedding=bool(spec.unknown_embedding),
        index_embedding=bool(spec.index_embedding),
        dal=spec.dal or "none",
        first_block=spec.first_block or "intact",
        variant=spec.variant,
    )


def _random_model(spec: ModelSpec, seed: int) -> LoadedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("random weights", spec.name, seed))
        check_complete(spec, spec.name)
        model = build(spec, spec.name)
    spec = replace(spec, trained_gamma=None)
    report = CheckpointReport(RANDOM, f"random-{seed}", "random", notes=("untrained weights",))
    return with_card(model, spec, report)


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
