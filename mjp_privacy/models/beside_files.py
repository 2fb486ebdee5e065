"""JSON files that libraries save beside weights: the fields that are read, typed and bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mjp_privacy.core.read import FileKind, is_there, read_json
from mjp_privacy.core.schema import Positive, Side, Switch, Width
from mjp_privacy.models.stated import Epsilon

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
