"""Checkpoints of networks that are no plain ViT: files whose metadata state their `sizes`.

`mjp train` writes them. Their tensors have timm's names for the network, so nothing but the sizes
has to be said; mean, std and the like stand in the metadata as a ViT's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import json_value, typed
from mjp_privacy.core.text import shown
from mjp_privacy.models.cards import ModelCard
from mjp_privacy.models.checkpoint_files import CHECKPOINT, WeightFile
from mjp_privacy.models.checkpoints import CheckpointReport
from mjp_privacy.models.families import OtherNetwork
from mjp_privacy.models.family_building import build_other
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.models.spec import ModelSpec, overridden
from mjp_privacy.models.stated import STATES, stated
from mjp_privacy.models.tensor_files import check_finite

SIZES = "network"
"""The entry of a file's metadata that states the sizes of another network than a ViT."""
PICTURES = ("mean", "std", "resize", "interpolation", "trained_gamma")
"""What a user may say of such a file; its sizes are its own."""


def is_other(file: WeightFile) -> bool:
    """Whether a file says that it holds another network than a ViT."""
    return SIZES in file.metadata


def load_other(
    name: str | None, file: WeightFile, overrides: Mapping[str, Any], *, outline: bool = False
) -> OtherNetwork:
    """The network of such a file in eval mode, with its card.

    outline  without weights, on torch's meta device: the file's shapes are enough
    """
    sizes = _sizes(file)
    spec = _spec(name, file, sizes, overrides)
    if not outline:
        check_finite(file.tensors, file.path, CHECKPOINT)
    with torch.device("meta"):
        _check_same(build_other(sizes), file)
    with torch.device("meta" if outline else "cpu"):
        network = build_other(sizes)
    if not outline:
        stored = {key: tensor.float() for key, tensor in file.tensors.items()}
        network.load_state_dict(stored, strict=False)
    report = CheckpointReport(file.path.name, file.sha256, sizes.family)
    network.card = _card(spec, sizes, report)
    return network.eval()


def weights_of(network: torch.nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a network: parameters, and statistics such as batch norm's."""
    kept = network.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in kept.items() if tensor.is_floating_point()}


def _sizes(file: WeightFile) -> Sizes:
    content = json_value(file.metadata[SIZES], file.path, STATES)
    sizes = typed(content, file.path, STATES, Sizes)
    sizes.check(file.shown)
    return sizes


def _spec(
    name: str | None, file: WeightFile, sizes: Sizes, overrides: Mapping[str, Any]
) -> ModelSpec:
    """How the file's network takes pictures; UserError for anything else that a user says of it."""
    given = {key: value for key, value in overrides.items() if value is not None}
    named = [f"model {name}"] if name else []
    if refused := [*named, *(f"{key}={given[key]}" for key in given if key not in PICTURES)]:
        raise UserError(
            f"{file.shown} holds a {sizes.family} and states its own sizes: expected no more than "
            f"{', '.join(PICTURES)}, got {shown(', '.join(refused), 100)}. Leave that out."
        )
    facts = {key: value for key, value in stated(file).items() if key in PICTURES}
    spec = overridden(replace(ModelSpec(f"custom {sizes.family}"), **facts), given)
    if spec.mean is None or spec.std is None:
        raise UserError(
            f"{file.shown}: mean and std cannot be read off the checkpoint and are never guessed. "
            "Expected mean=… and std=…, got none. Give them."
        )
    return spec


def _check_same(network: OtherNetwork, file: WeightFile) -> None:
    """Raise unless the file's tensors are those of a network of the sizes that it states."""
    expected, family = weights_of(network), network.family
    for key in [*expected, *file.tensors]:
        here, there = expected.get(key), file.tensors.get(key)
        if here is None or there is None or here.shape != there.shape:
            got = "no such tensor" if there is None else f"{tuple(there.shape)}"
            wanted = "no such tensor" if here is None else f"{tuple(here.shape)}"
            raise UserError(
                f"{file.shown} states the sizes of a {family} that its tensors do not have: "
                f"{shown(key, 60)}: expected {wanted}, got {got}. Give the file as `mjp train` "
                "wrote it."
            )


def _card(spec: ModelSpec, sizes: Sizes, report: CheckpointReport) -> ModelCard:
    assert spec.mean is not None
    assert spec.std is not None
    return ModelCard(
        name=spec.name,
        architecture=str(sizes),
        img_size=sizes.img_size,
        resize=spec.resize,
        interpolation=spec.interpolation or "bicubic",
        mean=spec.mean,
        std=spec.std,
        num_classes=sizes.num_classes,
        trained_gamma=spec.trained_gamma,
        checkpoint=report,
    )
