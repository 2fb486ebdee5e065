"""Facts that libraries save in JSON files beside the weights, since no tensor shows them.

    timm           config.json: mean, std, size, crop; the architecture's name states the heads
    transformers   config.json: heads, eps, activation; preprocessor_config.json: mean, std, sizes
    open_clip      open_clip_config.json: heads, activation, mean, std

Only the files of the library whose layout the weights have are read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, is_there, read_json
from mjp_privacy.core.schema import Positive, Side, Switch, Width
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoints import Shape
from mjp_privacy.models.layouts import Layout
from mjp_privacy.models.sizes import ACTIVATIONS
from mjp_privacy.models.spec import Epsilon, ModelSpec, three_numbers
from mjp_privacy.models.zoo import architecture

BESIDE = FileKind(
    "the JSON file that a library saves beside weights",
    "Copy or download it again, or remove it and give the facts yourself.",
    4 << 20,
)
T = TypeVar("T")
Word = Annotated[str, Field(strict=True, max_length=200)]
Sided = Annotated[list[Side], Field(max_length=4)]
OF_STRANGERS = ConfigDict(extra="ignore", allow_inf_nan=False)
"""For files of other libraries: of the many fields that they hold, a few are read."""


@dataclass(frozen=True, config=OF_STRANGERS)
class TimmPictures:
    """How timm's weights take pictures."""

    input_size: Sided | None = None
    crop_pct: Positive | None = None
    mean: Any = None  # `three_numbers` checks mean and std of all libraries
    std: Any = None
    interpolation: Word | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class TimmName:
    """What tells timm's config.json from another program's."""

    architecture: Word | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class Timm:
    """config.json of timm's hub."""

    pretrained_cfg: TimmPictures | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class Vision:
    """The vision model in transformers' config.json."""

    num_attention_heads: Width | None = None
    hidden_size: Width | None = None
    layer_norm_eps: Epsilon | None = None
    hidden_act: Word | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class Transformers:
    """config.json of transformers, which holds a vision model or is one."""

    vision_config: Vision | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class Sides:
    """Sides of a picture."""

    height: Side | None = None
    shortest_edge: Side | None = None


def _as_sides(size: Any) -> Any:
    """One number is the side of a square."""
    return {"height": size} if isinstance(size, int | float | str) else size


@dataclass(frozen=True, config=OF_STRANGERS)
class Pictures:
    """preprocessor_config.json of transformers."""

    size: Annotated[Sides | None, BeforeValidator(_as_sides)] = None
    image_mean: Any = None
    image_std: Any = None
    resample: Annotated[int, Field(strict=True, ge=0, le=5)] | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class OpenClipVision:
    """The visual tower of open_clip's config."""

    width: Width | None = None
    head_width: Width | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class OpenClipModel:
    """The model of open_clip's config."""

    quick_gelu: Switch | None = None
    vision_cfg: OpenClipVision | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class OpenClipPictures:
    """How open_clip's weights take pictures."""

    mean: Any = None
    std: Any = None
    interpolation: Word | None = None


@dataclass(frozen=True, config=OF_STRANGERS)
class OpenClip:
    """open_clip_config.json."""

    model_cfg: OpenClipModel | None = None
    preprocess_cfg: OpenClipPictures | None = None


def beside_file(path: Path, schema: type[T]) -> T:
    """The fields of a JSON file that `schema` names; all of them open where there is no file."""
    return read_json(path, BESIDE, schema) if is_there(path) else schema()


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
    if not is_there(file):
        return spec
    if layout.name == "timm":
        stated = _timm(file.parent)
    elif layout.name.startswith("hf_"):
        stated = _transformers(file.parent)
    elif layout.name == "open_clip":
        stated = _open_clip(file.parent)
    else:
        return spec
    facts = {name: value for name, value in stated.items() if value is not None}
    width = facts.pop("width", shape.embed_dim)
    if width != shape.embed_dim:
        raise UserError(
            f"{shown(file.name)} is of width {shape.embed_dim}, the JSON file beside it of width "
            f"{width}: expected both of one model. Give a folder that holds one model alone."
        )
    for key in ("mean", "std"):
        if key in facts:
            facts[key] = three_numbers(key, facts[key], f"The JSON beside {shown(file.name)}")
    return replace(spec, **facts)


def _timm(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    architecture_name = beside_file(path, TimmName).architecture
    if architecture_name is None:
        return {}  # of another program
    pictures = beside_file(path, Timm).pretrained_cfg or beside_file(path, TimmPictures)
    side, crop = pictures.input_size[-1] if pictures.input_size else None, pictures.crop_pct
    named = architecture(architecture_name)
    return {
        "num_heads": named.num_heads,
        "width": named.embed_dim,
        "mean": pictures.mean,
        "std": pictures.std,
        "img_size": side,
        "resize": int(side / crop) if side and crop else None,
        "interpolation": pictures.interpolation,
    }


def _transformers(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    config = beside_file(path, Transformers)
    vision = config.vision_config or beside_file(path, Vision)
    pictures = beside_file(folder / IMAGES, Pictures)
    sides = pictures.size or Sides()
    return {
        "num_heads": vision.num_attention_heads,
        "width": vision.hidden_size,
        "norm_eps": vision.layer_norm_eps,
        "activation": _activation(vision.hidden_act, path),
        "mean": pictures.image_mean,
        "std": pictures.image_std,
        "resize": sides.shortest_edge or sides.height,
        "interpolation": RESAMPLING.get(pictures.resample or 0),
    }


def _open_clip(folder: Path) -> dict[str, Any]:
    path = folder / OPEN_CLIP
    if not is_there(path):
        return {}
    config = beside_file(path, OpenClip)
    model = config.model_cfg or OpenClipModel()
    vision = model.vision_cfg or OpenClipVision()
    pictures = config.preprocess_cfg or OpenClipPictures()
    of_a_head = vision.head_width or HEAD_WIDTH
    return {
        "num_heads": vision.width // of_a_head if vision.width else None,
        "width": vision.width,
        "activation": "quick_gelu" if model.quick_gelu else "gelu",
        "mean": pictures.mean,
        "std": pictures.std,
        "interpolation": pictures.interpolation,
    }


def _activation(name: str | None, path: Path) -> str | None:
    """This package's name of an activation that transformers' config names."""
    own = HIDDEN_ACTIVATIONS.get(str(name), name) if name else None
    if own is not None and own not in ACTIVATIONS:
        raise UserError(
            f"{shown(path)}: hidden_act is {shown(name)!r}: expected one of "
            f"{', '.join([*ACTIVATIONS, *HIDDEN_ACTIVATIONS])}. A network with another activation "
            "cannot be built here."
        )
    return own
