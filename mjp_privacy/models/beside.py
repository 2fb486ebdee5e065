"""Facts that libraries save in JSON files beside the weights, since no tensor shows them.

    timm           config.json: mean, std, size, crop; the architecture's name states the heads
    transformers   config.json: heads, eps, activation; preprocessor_config.json: mean, std, sizes
    open_clip      open_clip_config.json: heads, activation, mean, std

Only the files of the library whose layout the weights have are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.checkpoints import Shape
from mjp_privacy.models.layouts import Layout
from mjp_privacy.models.spec import ModelSpec, three_numbers
from mjp_privacy.models.variant import ACTIVATIONS
from mjp_privacy.models.zoo import architecture

CONFIG, IMAGES, OPEN_CLIP = "config.json", "preprocessor_config.json", "open_clip_config.json"
HIDDEN_ACTIVATIONS = {  # transformers' names of what has another name here
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
}
RESAMPLING = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
HEAD_WIDTH = 64  # open_clip's, where its config states none


def with_facts_beside(spec: ModelSpec, file: Path, layout: Layout, shape: Shape) -> ModelSpec:
    """The spec with the facts in the JSON files beside a file of weights, where there are any.

    They win over the defaults that come with a model's name.
    """
    if not file.is_file():
        return spec
    if layout.name == "timm":
        facts = _timm(file.parent)
    elif layout.name.startswith("hf_"):
        facts = _transformers(file.parent)
    elif layout.name == "open_clip":
        facts = _open_clip(file.parent)
    else:
        return spec
    facts = {name: value for name, value in facts.items() if value is not None}
    width = facts.pop("width", shape.embed_dim)
    if width != shape.embed_dim:
        raise UserError(
            f"{file.name} is of width {shape.embed_dim}, the JSON file beside it of width {width}: "
            "expected both of one model. Give a folder that holds one model alone."
        )
    for key in ("mean", "std"):
        if key in facts:
            facts[key] = three_numbers(key, facts[key])
    return replace(spec, **facts)


def _timm(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    config = _read(path)
    if "architecture" not in config:
        return {}  # of another program
    pictures = _part(config, "pretrained_cfg", path) or config
    size = pictures.get("input_size")
    sides = {"side": size[-1] if isinstance(size, list) and size else None}
    side, crop = _number(sides, "side", path), _number(pictures, "crop_pct", path)
    named = architecture(str(config["architecture"]))
    return {
        "num_heads": named.num_heads,
        "width": named.embed_dim,
        "mean": pictures.get("mean"),
        "std": pictures.get("std"),
        "img_size": side,
        "resize": int(side / crop) if side and crop else None,
        "interpolation": pictures.get("interpolation"),
    }


def _transformers(folder: Path) -> dict[str, Any]:
    path, image_path = folder / CONFIG, folder / IMAGES
    config = _read(path)
    vision = _part(config, "vision_config", path) or config
    pictures = _read(image_path)
    size = pictures.get("size")
    sides = size if isinstance(size, Mapping) else {"height": size}
    key = "shortest_edge" if "shortest_edge" in sides else "height"
    resampling = _number(pictures, "resample", image_path)
    return {
        "num_heads": _number(vision, "num_attention_heads", path),
        "width": _number(vision, "hidden_size", path),
        "norm_eps": _number(vision, "layer_norm_eps", path),
        "activation": _activation(vision.get("hidden_act"), path),
        "mean": pictures.get("image_mean"),
        "std": pictures.get("image_std"),
        "resize": _number(sides, key, image_path),
        "interpolation": None if resampling is None else RESAMPLING.get(int(resampling)),
    }


def _open_clip(folder: Path) -> dict[str, Any]:
    path = folder / OPEN_CLIP
    config = _read(path)
    if not config:
        return {}
    model = _part(config, "model_cfg", path)
    vision = _part(model, "vision_cfg", path)
    pictures = _part(config, "preprocess_cfg", path)
    width = _number(vision, "width", path)
    of_a_head = _number(vision, "head_width", path) or HEAD_WIDTH
    return {
        "num_heads": int(width // of_a_head) if width else None,
        "width": width,
        "activation": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "mean": pictures.get("mean"),
        "std": pictures.get("std"),
        "interpolation": pictures.get("interpolation"),
    }


def _activation(name: str | None, path: Path) -> str | None:
    """This package's name of an activation that transformers' config names."""
    own = HIDDEN_ACTIVATIONS.get(str(name), name) if name else None
    if own is not None and own not in ACTIVATIONS:
        raise UserError(
            f"{path}: hidden_act is {name!r}: expected one of "
            f"{', '.join([*ACTIVATIONS, *HIDDEN_ACTIVATIONS])}. A network with another activation "
            "cannot be built here."
        )
    return own


def _number(config: Mapping[str, Any], key: str, path: Path) -> Any:
    """A positive number of a config; None where it states none."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(
            f"{path}: {key}: expected a positive number, got {value!r}. Copy or download the file "
            "again, or remove it and give the facts yourself."
        )
    return value


def _part(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    """A dictionary inside a config; an empty one where there is none."""
    part = config.get(key) or {}
    if not isinstance(part, Mapping):
        raise UserError(f"{path}: {key}: expected a dictionary, got {type(part).__name__}.")
    return part


def _read(path: Path) -> Mapping[str, Any]:
    """A JSON file's dictionary; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is no JSON ({error}): expected what the library saved beside the weights. "
            "Copy or download it again, or remove it and give the facts yourself."
        ) from error
    if not isinstance(config, Mapping):
        raise UserError(
            f"{path}: expected a JSON dictionary, got {type(config).__name__}. Copy or download it "
            "again, or remove it and give the facts yourself."
        )
    return config
