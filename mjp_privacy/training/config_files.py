"""Reads the config of a training: a YAML file with a base and named rows; checked, then frozen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import parse
from mjp_privacy.core.text import shown
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


def row_of(content: Mapping[str, Any], row: str | None, where: str) -> dict[str, Any]:
    """The config of one row: the base, with the row's fields in place of the base's.

    The row's name is added to the config's: row J of `cifar10` is named `cifar10-J`. `where` names
    the file in error messages.
    """
    base = dict(content)
    rows = base.pop("rows", None) or {}
    if rows and row is None:
        raise UserError(
            f"{where} holds {len(rows)} rows: expected --row NAME, got none. "
            f"Rows: {', '.join(map(str, rows))}."
        )
    if row is None:
        return base
    if row not in rows:
        raise UserError(f"{where}: {unknown_name('row', row, [str(name) for name in rows])}")
    changes = rows[row] or {}
    if not isinstance(changes, Mapping):
        raise UserError(
            f"{where}, rows.{row}: expected fields that replace the base's, got {changes!r}."
        )
    fields = merged(base, changes)
    fields["name"] = f"{base.get('name', '')}-{row}".strip("-")
    return fields


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with these fields changed, also inside nested mappings."""
    fields = dict(base)
    for key, value in changes.items():
        both_nested = isinstance(value, Mapping) and isinstance(fields.get(key), Mapping)
        fields[key] = merged(fields[key], value) if both_nested else value
    return fields
