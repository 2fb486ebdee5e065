"""Reads a network that a segmentation trained back from its file: the file says how it was made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.fields import parse
from mjp_privacy.core.gate.json_files import json_value
from mjp_privacy.core.gate.tensor_files import TensorFile, check_finite
from mjp_privacy.core.sealed import check_seal
from mjp_privacy.core.shown import shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT, check_is_there, located
from mjp_privacy.training.config import TrainingConfig
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
    check_seal(path, KIND, needed=False)
    config = parse(TrainingConfig, recipe, shown(path), {})
    network = build_segmentation(replace(config, initial=None))
    expected, stored = network.state_dict(), file.tensors()
    for name in sorted(expected.keys() | stored.keys()):
        here, there = (tuple(t[name].shape) if name in t else None for t in (expected, stored))
        if here != there:
            raise UserError(
                f"{shown(path)} states the sizes of a network that its tensors do not have: "
                f"{shown(name, 60)}: expected {here or 'no such tensor'}, got "
                f"{there or 'no such tensor'}. Give the file as `mjp train` wrote it."
            )
    check_finite(stored, path, KIND)
    network.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    return network.eval(), config
