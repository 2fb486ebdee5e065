"""What a model is built from: gathered from its name, the user, timm, and the checkpoint file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked
from pydantic_core import PydanticCustomError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import json_value, typed
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.schema import STRICT, Classes, Depth, Share, Side, Switch, Width, parse
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT, WeightFile
from mjp_privacy.models.checkpoints import Shape
from mjp_privacy.models.layouts import Layout
from mjp_privacy.models.mjp_vit import DalKind, FirstBlock, PositionEmbedding
from mjp_privacy.models.sizes import Activation, AdaptersText, Variant

STATES = replace(CHECKPOINT, expected="metadata of weights that state their model")
CHANNELS = 3
LARGEST = 2.0  # a mean or std beyond it is not of pixels in [0, 1]
SMALLEST_STD = 1e-4


def three_numbers(key: str, value: Any, where: str = "") -> tuple[float, ...]:
    """Per-channel mean or std from one number or three; UserError for anything else.

    where: what the message begins with, such as a file's name
    """
    begin = f"{where}, {key}" if where else key
    numbers, got = _numbers(value), shown(repr(value), 100)
    least = SMALLEST_STD if key == "std" else -math.inf
    if len(numbers) != CHANNELS or not all(math.isfinite(n) and n >= least for n in numbers):
        kind = "positive number" if key == "std" else "number"
        raise UserError(f"{begin}: expected one {kind} or three, one per channel; got {got}.")
    if max(map(abs, numbers)) > LARGEST:
        raise UserError(
            f"{begin}: expected that of pixels from 0 to 1, got {got}, as of pixels from 0 to "
            f"255. Give {key}={[round(n / 255, 4) for n in numbers]}."
        )
    return tuple(numbers)


def _numbers(value: Any) -> list[float]:
    """One number three times, or the numbers of a list; empty where anything is no number."""
    if isinstance(value, str | bytes | Mapping | Set):
        return []
    try:
        values = list(value)
    except TypeError:
        values = [value] * CHANNELS
    try:
        return [] if any(isinstance(v, bool | str) for v in values) else [float(v) for v in values]
    except (TypeError, ValueError, OverflowError):
        return []


def _channels(key: str) -> BeforeValidator:
    def checked(value: Any) -> tuple[float, ...]:
        try:
            return three_numbers(key, value)
        except UserError as error:
            said = str(error).removeprefix(f"{key}: ").partition(" got ")[0].rstrip(";, ")
            raise PydanticCustomError("channels", said) from error

    return BeforeValidator(checked)


Epsilon = Annotated[float, Field(strict=True, gt=0, le=1)]


@checked(frozen=True, config=STRICT)
class Stated:
    """The facts of a model that a file of weights may state; None: it states that there is none."""

    mean: Annotated[tuple[float, ...] | None, _channels("mean")] = None
    std: Annotated[tuple[float, ...] | None, _channels("std")] = None
    num_heads: Width | None = None
    img_size: Side | None = None
    resize: Side | None = None
    interpolation: Literal["bicubic", "bilinear"] | None = None
    position_embedding: PositionEmbedding | None = None
    first_block: FirstBlock | None = None
    dal: DalKind | None = None
    norm_eps: Epsilon | None = None
    activation: Activation | None = None
    trained_gamma: Share | None = None
    adapters: AdaptersText | None = None


METADATA = tuple(field.name for field in dataclasses.fields(Stated))
"""Keys of a file's metadata that describe its model; their values are JSON."""


def stated(file: WeightFile) -> dict[str, Any]:
    """The facts that the file's metadata states, by field of `ModelSpec`."""
    content = {}
    for key in METADATA:
        if key in file.metadata:
            content[key] = _value(file, key)
    facts = typed(content, file.path, STATES, Stated)
    values = {key: getattr(facts, key) for key in content}
    if values.get("position_embedding", "") is None:  # every model has one or the other
        del values["position_embedding"]
    return values


def _value(file: WeightFile, key: str) -> Any:
    text = file.metadata[key]
    try:
        return json_value(text, file.path, STATES)
    except UserError as error:
        raise STATES.refusal(
            file.path, f"metadata {key!r} is not JSON: {shown(repr(text), 100)}"
        ) from error


@dataclass(frozen=True)
class ModelSpec:
    """Everything needed to build a model; None: read off the checkpoint, or else must be given."""

    name: str
    img_size: int | None = None
    patch_size: int | None = None
    embed_dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None
    num_classes: int | None = None
    mlp_ratio: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: int | None = None  # short side before the centre crop; None: round(size * 248 / 224)
    interpolation: str | None = None  # None: bicubic
    position_embedding: PositionEmbedding = "learned"
    unknown_embedding: bool | None = None
    index_embedding: bool | None = None
    dal: DalKind | None = None
    first_block: FirstBlock | None = None
    pre_norm: bool | None = None
    patch_bias: bool | None = None
    qkv_bias: bool | None = None
    head_bias: bool | None = None
    distillation_token: bool | None = None
    norm_eps: float | None = None
    activation: Activation | None = None
    adapters: str | None = None  # low-rank ones beside linear layers, as `LowRank.text` has them
    checkpoint: str | None = None  # the weights that are used if the user names none
    trained_gamma: float | None = None
    where: str = ""  # advice where the weights cannot be downloaded by name
    summary: str = ""  # one line for `mjp list models`

    @property
    def variant(self) -> Variant:
        """Where the network differs from timm's plain one; open fields are as there."""
        stated = {field.name: getattr(self, field.name) for field in fields(Variant)}
        return Variant(**{name: value for name, value in stated.items() if value is not None})


MlpRatio = Annotated[float, Field(strict=True, gt=0, le=64)]
CHOICES = {
    "position_embedding": PositionEmbedding,
    "dal": DalKind,
    "first_block": FirstBlock,
    "activation": Activation,
}


@checked(frozen=True, config=STRICT)
class _Given:
    """What a user may give of a model beside its sizes, its pixels and what CHOICES hold."""

    mlp_ratio: MlpRatio | None = None
    resize: Side | None = None
    interpolation: Literal["bicubic", "bilinear"] | None = None
    unknown_embedding: Switch | None = None
    index_embedding: Switch | None = None
    pre_norm: Switch | None = None
    patch_bias: Switch | None = None
    qkv_bias: Switch | None = None
    head_bias: Switch | None = None
    distillation_token: Switch | None = None
    trained_gamma: Share | None = None


def overridden(spec: ModelSpec, overrides: Mapping[str, Any]) -> ModelSpec:
    """The spec with the user's fields in place of its own; an unknown field is an error."""
    not_given = {"name", "checkpoint", "where", "summary", "adapters"}
    names = sorted({field.name for field in fields(ModelSpec)} - not_given)
    for key in overrides:
        if key not in names:
            raise unknown_name("model field", key, names)
    changes = {key: value for key, value in overrides.items() if value is not None}
    for key, kind in CHOICES.items():
        check_choice(key, changes.get(key), kind)
    check_sizes(spec.name, changes)
    typed = {key: value for key, value in changes.items() if key in _Given.__annotations__}
    parse(_Given, typed, f"The model {shown(spec.name, 100)}", {})
    for key in ("mean", "std"):
        if key in changes:
            changes[key] = three_numbers(key, changes[key])
    sized = at_size(spec, changes["img_size"]) if "img_size" in changes else spec
    return replace(sized, **changes)


SIZES: Mapping[str, TypeAdapter[int]] = {
    "img_size": TypeAdapter(Side),
    "patch_size": TypeAdapter(Side),
    "embed_dim": TypeAdapter(Width),
    "depth": TypeAdapter(Depth),
    "num_heads": TypeAdapter(Width),
    "num_classes": TypeAdapter(Classes),
}


def check_sizes(name: str, sizes: Mapping[str, Any]) -> None:
    """Raise a UserError unless these sizes of a model are numbers that a network can have.

    name: the model's, for the message; a number of classes may be 0, as of a network without head
    """
    wrong = []
    for key, value in sizes.items():
        if key not in SIZES or (key == "num_classes" and value == 0 and value is not False):
            continue
        try:
            SIZES[key].validate_python(value)
        except ValidationError as error:
            most = error.errors()[0].get("ctx", {}).get("le")
            wrong.append(f"{key}={shown(repr(value), 60)}" + (f" (at most {most})" if most else ""))
    if wrong:
        raise UserError(
            f"{shown(name, 100)}: expected whole numbers from 1, got {', '.join(wrong)}."
        )


def at_size(spec: ModelSpec, size: int | None) -> ModelSpec:
    """The spec for another input size; `resize` changes in proportion, so the crop stays alike."""
    if size is None or spec.resize is None or spec.img_size in (None, size):
        return spec
    assert spec.img_size is not None
    return replace(spec, img_size=size, resize=round(spec.resize * size / spec.img_size))


def check_choice(key: str, value: str | None, kind: Any) -> None:
    """Raise unless `value` is one of the strings of the Literal `kind`, or None."""
    if value is not None and (not isinstance(value, str) or value not in get_args(kind)):
        raise unknown_name(key, shown(value, 60), list(get_args(kind)))


CLIP_EPS = 1e-5


def with_metadata(spec: ModelSpec, file: WeightFile) -> ModelSpec:
    """The spec with the facts that our own exports carry (mean, num_heads, gamma, …).

    They win over the defaults that come with a model's name.
    """
    return replace(spec, **stated(file))


def completed(spec: ModelSpec, shape: Shape, layout: Layout) -> ModelSpec:
    """The spec with its open fields (None) read off the checkpoint's tensors and their names.

    Networks with a norm before block 0 are CLIP's, whatever the names: their activation is open.
    """
    patch = spec.patch_size or shape.patch_size
    from_tensors: dict[str, Any] = {
        "embed_dim": shape.embed_dim,
        "depth": shape.depth,
        "patch_size": patch,
        "num_classes": shape.num_classes,
        "mlp_ratio": shape.mlp_ratio,
        "img_size": shape.grid * patch if shape.grid else None,
        "unknown_embedding": shape.unknown_embedding and spec.position_embedding == "learned",
        "index_embedding": shape.index_embedding,
        "dal": shape.dal if spec.position_embedding == "learned" else "none",
        "pre_norm": shape.pre_norm,
        "patch_bias": shape.patch_bias,
        "qkv_bias": shape.qkv_bias,
        "head_bias": shape.head_bias,
        "distillation_token": shape.distillation_token,
        "norm_eps": CLIP_EPS if shape.pre_norm else layout.norm_eps,
        "activation": None if shape.pre_norm else layout.activation,
    }
    return filled(spec, from_tensors)


def filled(spec: ModelSpec, values: Mapping[str, Any]) -> ModelSpec:
    """The spec with its open fields (None) taken from `values`."""
    return replace(spec, **{k: v for k, v in values.items() if getattr(spec, k) is None})
