"""What a model is built from: gathered from its name, the user, timm, and the checkpoint file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.models.checkpoint_files import WeightFile
from mjp_privacy.models.checkpoints import Shape
from mjp_privacy.models.layouts import Layout
from mjp_privacy.models.localization import DalKind
from mjp_privacy.models.mjp_vit import FirstBlock, PositionEmbedding
from mjp_privacy.models.variant import Activation, Variant


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
    checkpoint: str | None = None  # the weights that are used if the user names none
    trained_gamma: float | None = None
    where: str = ""  # advice where the weights cannot be downloaded by name
    summary: str = ""  # one line for `mjp list models`

    @property
    def variant(self) -> Variant:
        """Where the network differs from timm's plain one; open fields are as there."""
        stated = {field.name: getattr(self, field.name) for field in fields(Variant)}
        return Variant(**{name: value for name, value in stated.items() if value is not None})


CHOICES = {
    "position_embedding": PositionEmbedding,
    "dal": DalKind,
    "first_block": FirstBlock,
    "activation": Activation,
}


def overridden(spec: ModelSpec, overrides: Mapping[str, Any]) -> ModelSpec:
    """The spec with the user's fields in place of its own; an unknown field is an error."""
    names = sorted(
        {field.name for field in fields(ModelSpec)} - {"name", "checkpoint", "where", "summary"}
    )
    for key in overrides:
        if key not in names:
            raise unknown_name("model field", key, names)
    changes = {key: value for key, value in overrides.items() if value is not None}
    for key, kind in CHOICES.items():
        check_choice(key, changes.get(key), kind)
    for key in ("mean", "std"):
        if key in changes:
            changes[key] = three_numbers(key, changes[key])
    sized = at_size(spec, changes["img_size"]) if "img_size" in changes else spec
    return replace(sized, **changes)


def at_size(spec: ModelSpec, size: int | None) -> ModelSpec:
    """The spec for another input size; `resize` changes in proportion, so the crop stays alike."""
    if size is None or spec.resize is None or spec.img_size in (None, size):
        return spec
    assert spec.img_size is not None
    return replace(spec, img_size=size, resize=round(spec.resize * size / spec.img_size))


def check_choice(key: str, value: str | None, kind: Any) -> None:
    """Raise unless `value` is one of the strings of the Literal `kind`, or None."""
    if value is not None and value not in get_args(kind):
        raise unknown_name(key, str(value), list(get_args(kind)))


LARGEST = 2.0  # a mean or std beyond it is not of pixels in [0, 1]


def three_numbers(key: str, value: float | Sequence[float]) -> tuple[float, ...]:
    """Per-channel mean or std from one number or three."""
    try:
        numbers = [float(number) for number in value]  # type: ignore[union-attr]
    except TypeError:
        numbers = [float(value)] * 3 if isinstance(value, int | float) else []
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(n) and (key == "mean" or n > 0) for n in numbers):
        kind = "number" if key == "mean" else "positive number"
        raise UserError(f"{key}: expected one {kind} or three, one per channel; got {value!r}.")
    if max(map(abs, numbers)) > LARGEST:
        raise UserError(
            f"{key}: expected that of pixels from 0 to 1, got {value!r}, as of pixels from 0 to "
            f"255. Give {key}={[round(n / 255, 4) for n in numbers]}."
        )
    return tuple(numbers)


CLIP_EPS = 1e-5
METADATA = (
    "mean",
    "std",
    "num_heads",
    "img_size",
    "resize",
    "interpolation",
    "position_embedding",
    "first_block",
    "dal",
    "norm_eps",
    "activation",
    "trained_gamma",
)
"""Keys of a checkpoint's metadata that describe its model; their values are JSON."""


def with_metadata(spec: ModelSpec, file: WeightFile) -> ModelSpec:
    """The spec with the facts that our own exports carry (mean, num_heads, gamma, …).

    They win over the defaults that come with a model's name.
    """
    facts: dict[str, Any] = {}
    for key in METADATA:
        if key not in file.metadata:
            continue
        try:
            value = json.loads(file.metadata[key])
        except ValueError as error:
            raise UserError(
                f"{file.path.name}: metadata {key!r} is not JSON: {file.metadata[key]!r}."
            ) from error
        facts[key] = three_numbers(key, value) if key in ("mean", "std") else value
        if key in CHOICES:
            check_choice(f"{file.path.name}: metadata {key}", value, CHOICES[key])
    return replace(spec, **facts)


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
