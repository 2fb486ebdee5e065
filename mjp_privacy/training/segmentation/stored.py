"""Reads a network that a segmentation trained back from its file: the file says how it was made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import json_value
from mjp_privacy.core.schema import parse
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT, check_is_there, located
from mjp_privacy.models.tensor_files import TensorFile, check_digest, check_finite
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.config_checks import check_config
from mjp_privacy.training.segmentation.network import SegmentationNetwork, build_segmentation

KIND = replace(
    CHECKPOINT,
    expected="a model.safetensors that `mjp train` wrote with task segmentation",
    do="Give such a file, or measure a classifier with --data.",
)


def load_segmentation(source: str) -> tuple[SegmentationNetwork, TrainingConfig]:
    """The network in eval mode on the CPU, in float32, and the config that it was trained with."""
    check_is_there(source, "--checkpoint")
    path = located(source)
    if path.suffix.lower() != ".safetensors":
        raise KIND.refusal(path, f"a file that ends with {shown(path.suffix) or 'nothing'}")
    file = TensorFile(path, KIND)
    recipe: Any = json_value(file.metadata.get("recipe", "null"), path, KIND)
    if not isinstance(recipe, dict) or recipe.get("task") != "segmentation":
        raise KIND.refusal(path, "a file that states no such training", "recipe")
    check_digest(path, KIND)
    config = parse(TrainingConfig, recipe, shown(path), {})
    check_config(config, shown(path))
    from_random = replace(config, initial=None)
    _check_shapes(from_random, file)
    network, stored = build_segmentation(from_random), file.tensors()
    check_finite(stored, path, KIND)
    network.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    return network.eval(), config


def _check_shapes(config: TrainingConfig, file: TensorFile) -> None:
    """Raise unless the file has the tensors that its config states, before memory is taken for
    either."""
    with torch.device("meta"):
        network = build_segmentation(config)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    for name in sorted(expected.keys() | file.shapes.keys()):
        stated, stored = (shapes.get(name) for shapes in (expected, file.shapes))
        if stated != stored:
            raise UserError(
                f"{shown(file.path)} states the sizes of a network that its tensors do not have: "
                f"{shown(name, 60)}: expected {_or_none(stated)}, got {_or_none(stored)}. Give the "
                "file as `mjp train` wrote it."
            )


def _or_none(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else str(shape)
