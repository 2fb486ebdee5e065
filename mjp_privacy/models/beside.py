"""Facts that libraries save in JSON files beside the weights, since no tensor shows them.

    timm           config.json: mean, std, size, crop; the architecture's name states the heads
    transformers   config.json: heads, eps, activation; preprocessor_config.json: mean, std, sizes
    open_clip      open_clip_config.json: heads, activation, mean, std

Only the files of the library whose layout the weights have are read, and of the many fields in
them those below, typed and bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, is_there, read_json, read_json_value
from mjp_privacy.core.schema import Positive, Side, Switch, Width
from mjp_privacy.core.text import shown
from mjp_privacy.models.layouts import Layout
from mjp_privacy.models.sizes import Activation
from mjp_privacy.models.spec import Epsilon, Interpolation, Mean, ModelSpec, Std
from mjp_privacy.models.zoo import architecture, is_timm_network

BESIDE = FileKind(
    "the JSON file that a library saves beside weights",
    "Copy or download it again, or remove it and give the facts yourself.",
    4 << 20,
)
CONFIG = "config.json"
FILES: Mapping[str, tuple[str, ...]] = {
    "timm": (CONFIG,),
    "open_clip": ("open_clip_config.json",),
    **dict.fromkeys(("hf_vit", "hf_deit", "hf_clip"), (CONFIG, "preprocessor_config.json")),
}
"""The files of each layout's library."""
RESAMPLING = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ACTIVATIONS = {"gelu_python": "gelu", **dict.fromkeys(TANH, "gelu_tanh")}
"""transformers' names of activations that have others here."""
HEAD_WIDTH = 64  # open_clip's, where its config states none
PICTURES = ("mean", "std", "img_size", "resize", "interpolation")
Word = Annotated[str, Field(strict=True, max_length=200)]


def _at(*places: str) -> Any:
    """A field that stands at the first of these places that the file has: `vision_config.x`."""
    paths: Any = ([int(x) if x.isdigit() else x for x in place.split(".")] for place in places)
    aliases = AliasChoices(*(AliasPath(*path) for path in paths))
    return Field(default=None, validation_alias=aliases)


def _side(size: Any) -> Any:
    """The short side of {"shortest_edge": 224}, {"height": 224, "width": 224} or 224."""
    if not isinstance(size, Mapping):
        return size
    sides = [size[name] for name in ("height", "width") if isinstance(size.get(name), int)]
    return size.get("shortest_edge", min(sides, default=None))


@dataclass(frozen=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class Stated:
    """What one of these files may state, in the words of the three libraries."""

    architecture: Word | None = None
    pool: Word | None = _at("model_args.global_pool")
    heads: Width | None = _at("vision_config.num_attention_heads", "num_attention_heads")
    width: Width | None = _at(
        "vision_config.hidden_size", "hidden_size", "model_cfg.vision_cfg.width"
    )
    head_width: Width | None = _at("model_cfg.vision_cfg.head_width")
    eps: Epsilon | None = _at("vision_config.layer_norm_eps", "layer_norm_eps")
    activation: Annotated[
        Activation | None, BeforeValidator(lambda name: ACTIVATIONS.get(str(name), name))
    ] = _at("vision_config.hidden_act", "hidden_act")
    quick_gelu: Switch | None = _at("model_cfg.quick_gelu")
    mean: Mean = _at("pretrained_cfg.mean", "preprocess_cfg.mean", "image_mean", "mean")
    std: Std = _at("pretrained_cfg.std", "preprocess_cfg.std", "image_std", "std")
    tall: Side | None = _at("pretrained_cfg.input_size.1", "input_size.1")
    side: Side | None = _at("pretrained_cfg.input_size.2", "input_size.2")
    crop: Positive | None = _at("pretrained_cfg.crop_pct", "crop_pct")
    size: Annotated[Side | None, BeforeValidator(_side)] = None
    interpolation: Interpolation | None = _at(
        "pretrained_cfg.interpolation", "preprocess_cfg.interpolation", "interpolation"
    )
    resample: Annotated[int, Field(strict=True, ge=0, le=5)] | None = None


def with_facts_beside(
    spec: ModelSpec, file: Path, layout: Layout, shape: Mapping[str, Any]
) -> ModelSpec:
    """The spec with the facts in the JSON files beside a file of weights, where there are any.

    They win over the defaults that come with a model's name.
    """
    facts = _facts(file, layout.name)
    width = facts.pop("width", shape["embed_dim"])
    if width != shape["embed_dim"]:
        raise UserError(
            f"{shown(file.name)} is of width {shape['embed_dim']}, the JSON file beside it of "
            f"width {width}: expected both of one model. Give a folder that holds one model alone."
        )
    return replace(spec, **facts)


def timm_beside(file: Path) -> tuple[str, dict[str, Any]] | None:
    """The architecture in timm's config.json beside a file of weights, and what else it states of
    the model; None without one, and for a plain ViT."""
    path = file.parent / CONFIG
    name = _architecture(path) if is_there(file) else None
    if name is None or not is_timm_network(name):
        return None
    import timm
    import torch

    if (pool := read_json(path, BESIDE, Stated).pool) is not None:
        with torch.device("meta"):
            own = getattr(timm.create_model(name), "global_pool", "")
        if pool != own:
            got = f"global_pool {shown(pool)}, and this timm's {name} has {own}"
            raise BESIDE.refusal(path, got, "global_pool")
    facts = _facts(file, "timm")
    return name, {field: facts[field] for field in PICTURES if field in facts}


def _architecture(path: Path) -> str | None:
    """The architecture that a config.json of timm's states; None in any other program's."""
    content = read_json_value(path, BESIDE) if is_there(path) else {}
    named = isinstance(content, Mapping) and content.get("architecture") is not None
    return str(content["architecture"]) if named else None


def _facts(file: Path, layout: str) -> dict[str, Any]:
    """What is stated beside a file, by field of `ModelSpec`, and the `width`."""
    paths = [path for name in FILES.get(layout, ()) if is_there(path := file.parent / name)]
    if not is_there(file) or (layout == "timm" and _architecture(file.parent / CONFIG) is None):
        return {}
    facts: dict[str, Any] = {}
    for path in paths:
        said = read_json(path, BESIDE, Stated)
        named = architecture(said.architecture or "")
        sides = [side for side in (said.tall, said.side) if side]
        heads = said.width // (said.head_width or HEAD_WIDTH) if said.width else None
        own = {
            "num_heads": heads if layout == "open_clip" else said.heads or named.num_heads,
            "width": said.width or named.embed_dim,
            "norm_eps": said.eps,
            "activation": said.activation,
            "mean": said.mean,
            "std": said.std,
            "img_size": (said.tall, said.side) if said.tall and said.side else said.side,
            "resize": int(min(sides) / said.crop) if sides and said.crop else said.size,
            "interpolation": said.interpolation or RESAMPLING.get(said.resample or 0),
        }
        if layout == "open_clip":
            own["activation"] = "quick_gelu" if said.quick_gelu else "gelu"
        facts |= {name: value for name, value in own.items() if value is not None}
    return facts
