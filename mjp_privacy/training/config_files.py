"""Reads the config of a training: a YAML file with a base and named rows; checked, then frozen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mjp_privacy.core.configs import read_mapping
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import parse
from mjp_privacy.core.text import shown
from mjp_privacy.models.sizes import check_parameters
from mjp_privacy.training.config import Segmentation, TrainingConfig, other_sizes
from mjp_privacy.training.published import preset_fields, without_empty_puzzle

MOST_CLASSES = 255
"""A label map has 8 bits a pixel, and its 0 is no class."""


def load_training(
    path: str | Path | Mapping[str, Any], row: str | None = None, **changes: Any
) -> TrainingConfig:
    """Read a config: load_training("configs/training/cifar10.yaml", "J", epochs=2).

    row      one of the file's `rows`, whose fields replace the base's and a preset's
    changes  fields of the recipe, seed, preset, task, or initial (a checkpoint); None keeps the
             file's
    """
    content, where = opened(path)
    given: dict[str, Any] = {"recipe": {k: v for k, v in changes.items() if v is not None}}
    for name in ("preset", "seed", "task", "initial"):
        if name in given["recipe"]:
            given[name] = given["recipe"].pop(name)
    if "initial" in given:
        given["initial"] = {"checkpoint": str(given["initial"])}
    preset = given.get("preset", content.get("preset", "ours"))
    family = row_of(content, row, where).get("family", "vit")
    fields = preset_fields(preset, family) if isinstance(preset, str) else {}
    content = without_empty_puzzle(row_of(merged(content, fields), row, where), preset)
    config = parse(TrainingConfig, merged(content, given), where)
    check_config(config, where)
    return config


def opened(path: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields of a config, and what messages call it."""
    if isinstance(path, Mapping):
        return dict(path), "the config"
    return dict(read_mapping(Path(path))), shown(path)


def row_of(content: Mapping[str, Any], row: str | None, where: str) -> dict[str, Any]:
    """The config of one row: the base, with the row's fields in place of the base's.

    The row's name is added to the config's: row J of `cifar10` is named `cifar10-J`. `where` names
    the file in error messages.
    """
    base = dict(content)
    rows = base.pop("rows", None) or {}
    if row is None:
        if rows:
            names = ", ".join(map(str, rows))
            raise UserError(f"{where} holds rows: expected --row, one of {names}; got none.")
        return base
    if row not in rows:
        raise UserError(f"{where}: {unknown_name('row', row, [str(name) for name in rows])}")
    changes = rows[row] or {}
    if not isinstance(changes, Mapping):
        raise UserError(
            f"{where}, rows.{row}: expected fields that replace the base's, got {changes!r}."
        )
    return {**merged(base, changes), "name": f"{base.get('name', '')}-{row}".strip("-")}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with these fields changed, also inside nested mappings. What should be a mapping and
    is none stays, for the schema to refuse."""
    fields = dict(base)
    for key, value in changes.items():
        before = fields.get(key)
        if isinstance(value, Mapping) and before is not None:
            value = merged(before, value) if isinstance(before, Mapping) else before
        fields[key] = value
    return fields


# what the fields must have in common --------------------------------------------------------------


def check_config(config: TrainingConfig, where: str) -> None:
    """Raise a UserError if fields contradict each other; `where` they stand."""
    model = config.model
    if (sizes := other_sizes(config)) is not None:
        sizes.check(where)
    if mistake := next(_mistakes(config), None):
        raise UserError(f"{where}: {mistake}.")
    sides = ("img_size", "patch_size", "embed_dim", "depth", "num_classes")
    check_parameters(where, **{name: getattr(model, name) for name in sides})


def _mistakes(config: TrainingConfig) -> Iterator[str]:
    """What is wrong with fields that are right one by one."""
    model, family, jigsaw = config.model, config.family, config.jigsaw
    if (family == "vit") != (config.stages is None):
        yield (
            "stages are the blocks in each stage of a swin or resnet: expected them there and "
            f"nowhere else, got family {family} and stages {config.stages}"
        )
    initial = config.initial and config.task == "classification"
    if family != "vit" and (initial or model.index_embedding or model.first_block != "intact"):
        yield (
            f"a {family} that classifies starts from nothing and has the blocks that it is "
            "published with; expected no initial, index_embedding: false and first_block: intact"
        )
    masked = model.unknown_embedding or model.dal != "none" or jigsaw.position_confound
    if model.position_embedding == "none" and masked:
        yield (
            "a model without position embeddings has none to mask, to localize or to start "
            "differently; expected unknown_embedding: false, dal: none, position_confound: false"
        )
    if model.img_size % model.patch_size or model.embed_dim % model.num_heads:
        yield (
            "expected img_size divisible by patch_size and embed_dim by num_heads, got "
            f"{model.img_size}/{model.patch_size} and {model.embed_dim}/{model.num_heads}"
        )
    for field in ("warmup_epochs", "first_epoch"):
        if not 0 <= (epoch := getattr(config, field)) <= config.recipe.epochs:
            yield f"{field}: expected 0 to epochs ({config.recipe.epochs}), got {epoch}"
    augmentation, in_memory = config.augmentation, config.data.store == "memory"
    if in_memory and (augmentation.rand_augment or augmentation.erasing):
        yield (
            "data.store memory augments whole batches by crop and flip; expected "
            "augmentation.rand_augment: null and erasing: 0, or data.store: files"
        )
    if config.task == "segmentation":
        yield from _of_segmentation(config)
    elif config.segmentation != Segmentation():
        yield "segmentation: these fields are read with task: segmentation alone"


def _of_segmentation(config: TrainingConfig) -> Iterator[str]:
    """The same of a segmentation: MJP enters through the weights alone, and what belongs to
    classification is off."""
    settings, augmentation = config.segmentation, config.augmentation
    if config.family == "resnet":
        yield "task segmentation has heads for family vit or swin, got resnet"
    if settings.head == "upernet" and config.family == "vit" and config.model.depth < 4:
        yield f"head upernet reads four blocks of a ViT, got depth {config.model.depth}"
    if settings.scales[0] > settings.scales[1]:
        scales = list(settings.scales)
        yield f"segmentation.scales: expected the smaller one first, got {scales}"
    if config.model.num_classes > MOST_CLASSES:
        yield f"model.num_classes: a label map has 8 bits a pixel, for {MOST_CLASSES} classes"
    if config.jigsaw.shuffle != "none" or config.model.dal != "none":
        yield (
            "in task segmentation MJP enters through the weights to start from (initial), as in "
            "the paper, which fine-tunes; expected jigsaw.shuffle: none and model.dal: none"
        )
    off = (augmentation.mixup, augmentation.cutmix, augmentation.erasing)
    if augmentation.rand_augment is not None or any(off):
        yield (
            "task segmentation scales, crops and flips pictures and label maps alike; expected "
            "rand_augment: null, mixup: 0, cutmix: 0 and erasing: 0"
        )
    if config.data.store != "files":
        yield "task segmentation reads files; expected data.store: files"


def recipe_in(metadata: Mapping[str, str]) -> TrainingConfig | None:
    """The config that a model was trained with, of its file's metadata; None where the file states
    none that this trainer reads."""
    try:
        content = json.loads(metadata.get("recipe", "null"))
        config = parse(TrainingConfig, content, "the recipe")
        check_config(config, "the recipe")
    except (ValueError, TypeError, RecursionError, UserError):
        return None
    return config
