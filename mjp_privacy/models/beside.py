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
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, AliasPath, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, is_there, read_json, read_json_value
from mjp_privacy.core.schema import Positive, Side, Switch, Width
from mjp_privacy.core.text import shown
from mjp_privacy.models.layouts import Layout
from mjp_privacy.models.sizes import Activation
from mjp_privacy.models.spec import Epsilon, Interpolation, Mean, ModelSpec, Std
from mjp_privacy.models.zoo import architecture, is_timm_network, pooling_of

BESIDE = FileKind(
    "the JSON file that a library saves beside weights",
    "Copy or download it again, or remove it and give the facts yourself.",
    4 << 20,
)
T = TypeVar("T")
CONFIG, IMAGES, OPEN_CLIP = "config.json", "preprocessor_config.json", "open_clip_config.json"
RESAMPLING = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
HEAD_WIDTH = 64  # open_clip's, where its config states none
OF_STRANGERS = ConfigDict(extra="ignore", allow_inf_nan=False)
Word = Annotated[str, Field(strict=True, max_length=200)]


def _at(*places: str | tuple[str | int, ...]) -> Any:
    """A field that stands at the first of these places that the file has."""
    paths = [AliasPath(*([place] if isinstance(place, str) else place)) for place in places]
    return Field(validation_alias=AliasChoices(*paths))


def _side(size: Any) -> Any:
    """The short side of {"shortest_edge": 224}, {"height": 224, "width": 224} or 224."""
    return size.get("shortest_edge", size.get("height")) if isinstance(size, Mapping) else size


def _own_activation(name: Any) -> Any:
    """This package's name of an activation that transformers' config names."""
    tanh = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
    return {"gelu_python": "gelu", **dict.fromkeys(tanh, "gelu_tanh")}.get(str(name), name)


@dataclass(frozen=True, config=OF_STRANGERS)
class Timm:
    """config.json of timm's hub."""

    architecture: Word | None = None
    pool: Annotated[Word | None, _at(("model_args", "global_pool"))] = None
    mean: Annotated[Mean, _at(("pretrained_cfg", "mean"), "mean")] = None
    std: Annotated[Std, _at(("pretrained_cfg", "std"), "std")] = None
    side: Annotated[Side | None, _at(("pretrained_cfg", "input_size", 2), ("input_size", 2))] = None
    crop: Annotated[Positive | None, _at(("pretrained_cfg", "crop_pct"), "crop_pct")] = None
    interpolation: Annotated[
        Interpolation | None, _at(("pretrained_cfg", "interpolation"), "interpolation")
    ] = None


@dataclass(frozen=True, config=OF_STRANGERS)
class Transformers:
    """config.json of transformers, which holds a vision model or is one."""

    heads: Annotated[
        Width | None, _at(("vision_config", "num_attention_heads"), "num_attention_heads")
    ] = None
    width: Annotated[Width | None, _at(("vision_config", "hidden_size"), "hidden_size")] = None
    eps: Annotated[Epsilon | None, _at(("vision_config", "layer_norm_eps"), "layer_norm_eps")] = (
        None
    )
    activation: Annotated[
        Activation | None,
        BeforeValidator(_own_activation),
        _at(("vision_config", "hidden_act"), "hidden_act"),
    ] = None


@dataclass(frozen=True, config=OF_STRANGERS)
class Pictures:
    """preprocessor_config.json of transformers."""

    size: Annotated[Side | None, BeforeValidator(_side)] = None
    mean: Annotated[Mean, _at("image_mean")] = None
    std: Annotated[Std, _at("image_std")] = None
    resample: Annotated[int, Field(strict=True, ge=0, le=5)] | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class OpenClip:
    """open_clip_config.json."""

    width: Annotated[Width | None, _at(("model_cfg", "vision_cfg", "width"))] = None
    head_width: Annotated[Width | None, _at(("model_cfg", "vision_cfg", "head_width"))] = None
    quick_gelu: Annotated[Switch | None, _at(("model_cfg", "quick_gelu"))] = None
    mean: Annotated[Mean, _at(("preprocess_cfg", "mean"))] = None
    std: Annotated[Std, _at(("preprocess_cfg", "std"))] = None
    interpolation: Annotated[Interpolation | None, _at(("preprocess_cfg", "interpolation"))] = None


def with_facts_beside(
    spec: ModelSpec, file: Path, layout: Layout, shape: Mapping[str, Any]
) -> ModelSpec:
    """The spec with the facts in the JSON files beside a file of weights, where there are any.

    They win over the defaults that come with a model's name.
    """
    readers = {"timm": _timm, "open_clip": _open_clip, "hf_vit": _transformers}
    readers |= {"hf_deit": _transformers, "hf_clip": _transformers}
    if not is_there(file) or layout.name not in readers:
        return spec
    stated = readers[layout.name](file.parent)
    facts = {name: value for name, value in stated.items() if value is not None}
    width = facts.pop("width", shape["embed_dim"])
    if width != shape["embed_dim"]:
        raise UserError(
            f"{shown(file.name)} is of width {shape['embed_dim']}, the JSON file beside it of "
            f"width {width}: expected both of one model. Give a folder that holds one model alone."
        )
    return replace(spec, **facts)


def timm_beside(file: Path) -> tuple[str, dict[str, Any]] | None:
    """The architecture in timm's config.json beside a file of weights, and what else it states of
    the model; None without one."""
    path = file.parent / CONFIG
    if not is_there(file) or not is_there(path):
        return None
    content = read_json_value(path, BESIDE)
    if not isinstance(content, Mapping) or content.get("architecture") is None:
        return None
    if not is_timm_network(str(content["architecture"])):
        return None
    said = _timm(file.parent)
    stated = ("mean", "std", "img_size", "resize", "interpolation")
    beside = _read(path, Timm)
    name = beside.architecture or ""
    if beside.pool is not None and beside.pool != (own := pooling_of(name)):
        raise BESIDE.refusal(
            path,
            f"global_pool {shown(beside.pool)}, and this timm's {name} has {own}",
            "global_pool",
        )
    return name, {field: said[field] for field in stated}


def _read(path: Path, schema: type[T]) -> T:
    """The fields of a JSON file that `schema` names; all of them open where there is no file."""
    return read_json(path, BESIDE, schema) if is_there(path) else schema()


def _timm(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    content = read_json_value(path, BESIDE) if is_there(path) else {}
    if isinstance(content, Mapping) and content.get("architecture") is None:
        return {}  # there is none, or it is another program's
    said = _read(path, Timm)
    named = architecture(str(said.architecture))
    return {
        "num_heads": named.num_heads,
        "width": named.embed_dim,
        "mean": said.mean,
        "std": said.std,
        "img_size": said.side,
        "resize": int(said.side / said.crop) if said.side and said.crop else None,
        "interpolation": said.interpolation,
    }


def _transformers(folder: Path) -> dict[str, Any]:
    vision, pictures = _read(folder / CONFIG, Transformers), _read(folder / IMAGES, Pictures)
    return {
        "num_heads": vision.heads,
        "width": vision.width,
        "norm_eps": vision.eps,
        "activation": vision.activation,
        "mean": pictures.mean,
        "std": pictures.std,
        "resize": pictures.size,
        "interpolation": RESAMPLING.get(pictures.resample or 0),
    }


def _open_clip(folder: Path) -> dict[str, Any]:
    if not is_there(folder / OPEN_CLIP):
        return {}
    said = _read(folder / OPEN_CLIP, OpenClip)
    return {
        "num_heads": said.width // (said.head_width or HEAD_WIDTH) if said.width else None,
        "width": said.width,
        "activation": "quick_gelu" if said.quick_gelu else "gelu",
        "mean": said.mean,
        "std": said.std,
        "interpolation": said.interpolation,
    }
