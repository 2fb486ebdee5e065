"""`load_model`: from a model's name or a file of weights to a network and a card describing it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.seeding import derive_seed
from mjp_privacy.models.checkpoint_files import (
    TIMM_PREFIX,
    download_timm,
    read_weight_file,
)
from mjp_privacy.models.checkpoints import (
    CheckpointReport,
    UnknownInit,
    load_into,
    shape_of,
    to_own_names,
)
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
from mjp_privacy.models.zoo import spec_by_name, timm_spec

RANDOM = "random"


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
                 Without a name the architecture is read off the checkpoint; `num_heads`, `mean`
                 and `std` cannot be read and must be given.
    checkpoint   a file (.safetensors, .pth, .pt; timm, DeiT or official MJP layout), `timm:NAME`
                 for a download, or `random` for seeded untrained weights.
    overrides    fields of `ModelSpec`: img_size, patch_size, embed_dim, depth, num_heads,
                 num_classes, mean, std, position_embedding, unknown_embedding, dal, ...
    unknown_init how to fill E_unk if the checkpoint has none; the card's notes say so.
    """
    check_choice("unknown_init", unknown_init, UnknownInit)
    spec = overridden(spec_by_name(name) if name else ModelSpec("custom"), overrides)
    source = str(checkpoint) if checkpoint is not None else spec.checkpoint
    if source is None:
        raise UserError(
            f"Model {spec.name!r} needs a checkpoint. {spec.where or 'Give checkpoint=PATH.'} "
            "checkpoint='random' builds it untrained."
        )
    if source == RANDOM:
        return _random_model(spec, seed)
    if source.startswith(TIMM_PREFIX):
        declared = timm_spec(source.removeprefix(TIMM_PREFIX))
        spec = filled(spec, vars(at_size(declared, spec.img_size)))
        file = download_timm(declared.name)
    else:
        file = read_weight_file(source)
        spec = overridden(with_metadata(spec, file), overrides)  # what the user gave wins
    state = to_own_names(file.tensors)
    spec = completed(spec, shape_of(state, file.path.name))
    model = _build(spec, file.path.name)
    report = load_into(model, state, file, unknown_init=unknown_init)
    return _with_card(model, spec, report)


def _build(spec: ModelSpec, source: str) -> LoadedModel:
    needed = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")
    missing = [key for key in (*needed, "mean", "std") if getattr(spec, key) is None]
    if missing:
        raise UserError(
            f"{source}: {', '.join(missing)} cannot be read off the checkpoint and are never "
            f"guessed. Expected {', '.join(f'{key}=…' for key in missing)}, got none. Give them to "
            "load_model or in the model's part of the config."
        )
    numbers = {key: getattr(spec, key) for key in needed}
    wrong = [f"{k}={v!r}" for k, v in numbers.items() if not isinstance(v, int) or v < 1]
    if wrong:
        raise UserError(f"{spec.name}: expected whole numbers from 1, got {', '.join(wrong)}.")
    size, patch = numbers["img_size"], numbers["patch_size"]
    width, heads = numbers["embed_dim"], numbers["num_heads"]
    if size % patch or width % heads:
        raise UserError(
            f"{spec.name}: expected img_size divisible by patch_size and embed_dim by num_heads, "
            f"got {size}/{patch} and {width}/{heads}."
        )
    return LoadedModel(
        **numbers,
        mlp_ratio=spec.mlp_ratio or 4.0,
        position_embedding=spec.position_embedding,
        unknown_embedding=bool(spec.unknown_embedding),
        index_embedding=bool(spec.index_embedding),
        dal=spec.dal or "none",
        first_block=spec.first_block or "intact",
    )


def _random_model(spec: ModelSpec, seed: int) -> LoadedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("random weights", spec.name, seed))
        model = _build(spec, spec.name)
    spec = replace(spec, trained_gamma=None)
    report = CheckpointReport(RANDOM, f"random-{seed}", "random", notes=("untrained weights",))
    return _with_card(model, spec, report)


def _with_card(model: LoadedModel, spec: ModelSpec, report: CheckpointReport) -> LoadedModel:
    assert spec.mean is not None
    assert spec.std is not None
    model.card = ModelCard(
        name=spec.name,
        architecture=(
            f"vit d{spec.embed_dim} l{spec.depth} h{spec.num_heads} "
            f"p{spec.patch_size}@{spec.img_size}"
            + (" closed-form block 0" if model.first_block == "closed_form" else "")
        ),
        img_size=int(spec.img_size or 0),
        resize=spec.resize,
        interpolation=spec.interpolation or "bicubic",
        mean=spec.mean,
        std=spec.std,
        num_classes=int(spec.num_classes or 0),
        trained_gamma=spec.trained_gamma,
        checkpoint=report,
    )
    return model.eval()
