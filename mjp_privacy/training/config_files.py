"""Reads the config of a training: a YAML file with a base and named rows; checked, then frozen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mjp_privacy.core.config_rows import merged, row_of
from mjp_privacy.core.fields import parse
from mjp_privacy.core.gate.yaml_files import read_mapping
from mjp_privacy.core.shown import shown
from mjp_privacy.training.config import (
    Architecture,
    Augmentation,
    Initial,
    Jigsaw,
    Recipe,
    Storage,
    TrainingConfig,
)
from mjp_privacy.training.config_checks import check_config
from mjp_privacy.training.presets import preset_fields, without_empty_puzzle
from mjp_privacy.training.segmentation.settings import Segmentation

_OWNERS: dict[str, Any] = {
    "model": Architecture,
    "recipe": Recipe,
    "augmentation": Augmentation,
    "jigsaw": Jigsaw,
    "data": Storage,
    "segmentation": Segmentation,
    "initial": Initial,
}


def load_training(
    path: str | Path | Mapping[str, Any], row: str | None = None, **changes: Any
) -> TrainingConfig:
    """Read a config: load_training("configs/training/cifar10.yaml", "J", epochs=2).

    row      one of the file's `rows`, whose fields replace the base's and a preset's
    changes  fields of the recipe, seed, preset, task, or initial (a checkpoint); None keeps the
             file's
    """
    content = dict(path) if isinstance(path, Mapping) else dict(read_mapping(Path(path)))
    where = "the config" if isinstance(path, Mapping) else shown(path)
    changes = {key: value for key, value in changes.items() if value is not None}
    if "preset" in changes:
        content["preset"] = changes.pop("preset")
    preset = content.get("preset", "ours")
    family = row_of(content, row, where).get("family", "vit")
    content = row_of(_with_preset(content, preset, family), row, where)
    content = without_empty_puzzle(content, preset)
    content |= {name: changes.pop(name) for name in ("seed", "task") if name in changes}
    if "initial" in changes:
        checkpoint = str(changes.pop("initial"))
        content["initial"] = _with(content.get("initial"), {"checkpoint": checkpoint})
    if changes:
        content["recipe"] = _with(content.get("recipe"), changes)
    config = parse(TrainingConfig, content, where, _OWNERS)
    check_config(config, where)
    return config


def _with_preset(content: Mapping[str, Any], preset: Any, family: Any) -> dict[str, Any]:
    """The base of a config with a preset's fields; what is no preset or no part, for the schema."""
    parts = preset_fields(preset, family) if isinstance(preset, str) else {}
    fitting = {
        part: fields
        for part, fields in parts.items()
        if content.get(part) is None or isinstance(content[part], Mapping)
    }
    return merged(content, fitting)


def _with(fields: Any, changes: Mapping[str, Any]) -> Any:
    """A part of a config with some fields replaced; what is no part stays, for the schema."""
    return (
        {**(fields or {}), **changes} if fields is None or isinstance(fields, Mapping) else fields
    )
