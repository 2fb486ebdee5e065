"""What a model is built from: gathered from its name, the user, timm, and the checkpoint file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import json_value, typed
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import (
    Depth,
    ImageSize,
    Share,
    Side,
    Size,
    Switch,
    Width,
    height_width,
    parse,
    schema,
)
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT, WeightFile
from mjp_privacy.models.layouts import Layout
from mjp_privacy.models.mjp_vit import DalKind, FirstBlock, PositionEmbedding
from mjp_privacy.models.sizes import Activation, AdaptersText, Variant

STATES = replace(CHECKPOINT, expected="metadata of weights that state their model")
CHANNELS = 3
LARGEST = 2.0  # of a mean or std; beyond it they are of pixels from 0 to 255
SMALLEST_STD = 1e-4
CLIP_EPS = 1e-5


def _channels(least: float) -> BeforeValidator:
    """One number for all channels, alone or in a list, or three, of pixels from 0 to 1."""

    def checked(value: Any) -> tuple[float, ...] | None:
        if value is None:
            return None
        listed = value.tolist() if hasattr(value, "tolist") else value
        numbers = listed if isinstance(listed, list | tuple) else [listed]
        if len(numbers) in (1, CHANNELS):
            real = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
            if real and all(least <= number <= LARGEST for number in numbers):
                return tuple(map(float, numbers)) * (CHANNELS // len(numbers))
        what = f"one number or three, one per channel, from {least} to {LARGEST}"
        raise PydanticCustomError("channels", f"Input should be {what}: of pixels from 0 to 1")

    return BeforeValidator(checked)


Mean = Annotated[tuple[float, ...] | None, _channels(-LARGEST)]
Std = Annotated[tuple[float, ...] | None, _channels(SMALLEST_STD)]
Epsilon = Annotated[float, Field(strict=True, gt=0, le=1)]
Interpolation = Literal["bicubic", "bilinear"]

# the spec -----------------------------------------------------------------------------------------


@schema
class ModelSpec:
    """Everything needed to build a model; None: read off the checkpoint, or else must be given."""

    name: str
    img_size: ImageSize | None = None
    patch_size: Side | None = None
    embed_dim: Width | None = None
    depth: Depth | None = None
    num_heads: Width | None = None
    num_classes: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] | None = None
    mlp_ratio: Annotated[float, Field(strict=True, gt=0, le=100)] | None = None
    mean: Mean = None
    std: Std = None
    resize: Side | None = None  # short side before the centre crop; None: round(size * 248 / 224)
    interpolation: Interpolation | None = None  # None: bicubic
    position_embedding: PositionEmbedding = "learned"
    unknown_embedding: Switch | None = None
    index_embedding: Switch | None = None
    dal: DalKind | None = None
    first_block: FirstBlock | None = None
    pre_norm: Switch | None = None
    patch_bias: Switch | None = None
    qkv_bias: Switch | None = None
    head_bias: Switch | None = None
    distillation_token: Switch | None = None
    norm_eps: Epsilon | None = None
    activation: Activation | None = None
    adapters: AdaptersText | None = None  # low-rank ones beside linear layers: `LowRank.text`
    checkpoint: str | None = None  # the weights that are used if the user names none
    trained_gamma: Share | None = None
    where: str = ""  # advice where the weights cannot be downloaded by name
    summary: str = ""  # one line for `mjp list models`

    @property
    def variant(self) -> Variant:
        """Where the network differs from timm's plain one; open fields are as there."""
        stated = {field.name: getattr(self, field.name) for field in fields(Variant)}
        return Variant(**{name: value for name, value in stated.items() if value is not None})


NOT_GIVEN = {"name", "checkpoint", "where", "summary", "adapters"}
"""What a user does not say of a model."""
METADATA = (
    *("mean", "std", "num_heads", "img_size", "resize", "interpolation", "position_embedding"),
    *("first_block", "dal", "norm_eps", "activation", "trained_gamma", "adapters"),
)
"""Keys of a file's metadata that describe its model; their values are JSON."""


def overridden(spec: ModelSpec, overrides: Mapping[str, Any]) -> ModelSpec:
    """The spec with the user's fields in place of its own; an unknown field is an error."""
    names = sorted({field.name for field in fields(ModelSpec)} - NOT_GIVEN)
    for key in overrides:
        if key not in names:
            raise unknown_name("model field", key, names)
    changes = {key: value for key, value in overrides.items() if value is not None}
    where = f"The model {shown(spec.name, 100)}"
    given = parse(ModelSpec, {"name": spec.name, **changes}, where)
    sized = at_size(spec, given.img_size)
    return replace(sized, **{key: getattr(given, key) for key in changes})


def at_size(spec: ModelSpec, size: Size | None) -> ModelSpec:
    """The spec for another input size; `resize` changes in proportion, so the crop stays alike."""
    if size is None or spec.resize is None or spec.img_size in (None, size):
        return spec
    assert spec.img_size is not None
    shorter, was = (min(height_width(one)) for one in (size, spec.img_size))
    return replace(spec, img_size=size, resize=round(spec.resize * shorter / was))


def stated(file: WeightFile) -> dict[str, Any]:
    """The facts that a file's metadata states, by field of `ModelSpec`: what our own exports carry
    (mean, num_heads, gamma, …). None: it states that there is none.

    Of anybody else's metadata only these entries are read, each of them JSON.
    """
    content = {}
    for key in METADATA:
        text = file.metadata.get(key)
        if text is None:
            continue
        try:
            content[key] = json_value(text, file.path, STATES)
        except UserError as error:
            got = f"metadata {key!r} is not JSON: {shown(repr(text), 100)}"
            raise STATES.refusal(file.path, got) from error
    if content.get("position_embedding", "") is None:  # every model has one or the other
        del content["position_embedding"]
    facts = typed({"name": file.path.name, **content}, file.path, STATES, ModelSpec)
    return {key: getattr(facts, key) for key in content}


def completed(spec: ModelSpec, shape: Mapping[str, Any], layout: Layout, source: str) -> ModelSpec:
    """The spec with its open fields (None) read off the checkpoint's tensors and their names.

    Networks with a norm before block 0 are CLIP's, whatever the names: their activation is open.
    """
    facts = dict(shape)
    grid, patch = facts.pop("grid"), spec.patch_size or shape["patch_size"]
    if grid and spec.img_size is None:
        if (side := math.isqrt(grid)) ** 2 != grid:
            raise UserError(
                f"{source}: its table has {grid} positions of patches, of no square picture: "
                "expected height and width in pixels. Give img_size: [height, width]."
            )
        facts["img_size"] = side * patch
    if spec.position_embedding != "learned":
        facts |= {"unknown_embedding": False, "dal": "none"}
    clip = shape["pre_norm"]
    facts["norm_eps"] = CLIP_EPS if clip else layout.norm_eps
    facts["activation"] = None if clip else layout.activation
    return filled(spec, facts)


def filled(spec: ModelSpec, values: Mapping[str, Any]) -> ModelSpec:
    """The spec with its open fields (None) taken from `values`."""
    return replace(spec, **{k: v for k, v in values.items() if getattr(spec, k) is None})
