"""What a model is built from, and models by name: the paper's, this package's, timm's ViTs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import is_there, read_mapping
from mjp_privacy.core.registry import Registry, did_you_mean, unknown_name
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
from mjp_privacy.models.checkpoint_files import PACKAGED_FOLDER, TIMM_PREFIX, read_metadata
from mjp_privacy.models.mjp_vit import (
    CheckpointReport,
    FirstBlock,
    ModelCard,
    PositionEmbedding,
)
from mjp_privacy.models.sizes import Activation, AdaptersText, DalKind, Variant
from mjp_privacy.models.vit import CHANNELS

LARGEST = 2.0  # of a mean or std; beyond it they are of pixels from 0 to 255
SMALLEST_STD = 1e-4


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

    def card(self, architecture: str, report: CheckpointReport) -> ModelCard:
        """The card of a network that was built from this complete spec."""
        assert self.mean is not None
        assert self.std is not None
        return ModelCard(
            name=self.name,
            architecture=architecture,
            img_size=self.img_size or 0,
            resize=self.resize,
            interpolation=self.interpolation or "bicubic",
            mean=self.mean,
            std=self.std,
            num_classes=int(self.num_classes or 0),
            trained_gamma=self.trained_gamma,
            checkpoint=report,
        )


NOT_GIVEN = {"name", "checkpoint", "where", "summary", "adapters"}
"""What a user does not say of a model."""


def overridden(spec: ModelSpec, overrides: Mapping[str, Any]) -> ModelSpec:
    """The spec with the user's fields in place of its own; an unknown field is an error."""
    names = sorted({field.name for field in fields(ModelSpec)} - NOT_GIVEN)
    for key in overrides:
        if key not in names:
            raise unknown_name("model field", key, names)
    changes = {key: value for key, value in overrides.items() if value is not None}
    given = parse(ModelSpec, {"name": spec.name, **changes}, "The model")
    sized = at_size(spec, given.img_size)
    return replace(sized, **{key: getattr(given, key) for key in changes})


def check_given(source: str, given: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise where a user says more of a network than what it does not state itself."""
    if refused := [f"{key}={value}" for key, value in given.items() if key not in allowed]:
        raise UserError(
            f"{source} states its own sizes: expected no more than {', '.join(allowed)}, got "
            f"{shown(', '.join(refused), 100)}. Leave that out."
        )


def at_size(spec: ModelSpec, size: Size | None) -> ModelSpec:
    """The spec for another input size; `resize` changes in proportion, so the crop stays alike."""
    if size is None or spec.resize is None or spec.img_size in (None, size):
        return spec
    assert spec.img_size is not None
    shorter, was = (min(height_width(one)) for one in (size, spec.img_size))
    return replace(spec, img_size=size, resize=round(spec.resize * shorter / was))


def filled(spec: ModelSpec, values: Mapping[str, Any]) -> ModelSpec:
    """The spec with its open fields (None) taken from `values`."""
    return replace(spec, **{k: v for k, v in values.items() if getattr(spec, k) is None})


# models by name -----------------------------------------------------------------------------------

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NAMES = PACKAGED_FOLDER / "names.yaml"


def _named_models() -> Registry[ModelSpec]:
    models: Registry[ModelSpec] = Registry("model")
    for name, stated in read_mapping(NAMES).items():
        own = dict(stated)
        like = models[own.pop("like")] if "like" in own else ModelSpec(name)
        models.register(name, replace(like, name=name, **own))
    return models


NAMED_MODELS = _named_models()
"""Those of names.yaml; the ViTs of timm and torchvision are known by their names."""

_WIDTHS = {  # timm's plain ViTs: width, depth, heads
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
}
_TORCHVISION = {  # size, patch, width, depth, heads
    "vit_b_16": (224, 16, 768, 12, 12),
    "vit_b_32": (224, 32, 768, 12, 12),
    "vit_l_16": (224, 16, 1024, 24, 16),
    "vit_l_32": (224, 32, 1024, 24, 16),
    "vit_h_14": (224, 14, 1280, 32, 16),
}
_TIMM_NAME = re.compile(
    r"(?:vit|deit)_(?P<width>tiny|small|base|large)_patch(?P<patch>\d+)_(?P<size>\d+)(?P<tag>\..+)?"
)


def spec_by_name(name: str) -> ModelSpec:
    """A named model, a timm ViT such as `vit_tiny_patch16_224[.tag]`, or torchvision's `vit_b_16`.

    torchvision's names, and timm's without a tag, are architectures alone: mean and std must be
    given.
    """
    if name in NAMED_MODELS:
        return NAMED_MODELS[name]
    plain = architecture(name)
    if plain.depth is None and not is_timm_network(name):
        raise _unknown_model(name)
    return timm_spec(name) if "." in name else plain


def is_timm_network(name: str) -> bool:
    """Whether a name is of a network of timm's that is no plain ViT: `models.timm_networks`.

    is_timm_network("vit_small_patch14_dinov2.lvd142m") is True
    """
    if name in NAMED_MODELS or architecture(name).depth is not None:
        return False
    import timm

    return timm.is_model(name.partition(".")[0])


def architecture(name: str) -> ModelSpec:
    """The dimensions that the name of a plain ViT of timm or torchvision states; the name alone of
    any other, also where its patches do not fill its size."""
    sizes, match = _TORCHVISION.get(name), _TIMM_NAME.fullmatch(name)
    if match and not int(match["size"]) % (int(match["patch"]) or 1):
        sizes = (int(match["size"]), int(match["patch"]), *_WIDTHS[match["width"]])
    if sizes is None:
        return ModelSpec(name)
    names = ("img_size", "patch_size", "embed_dim", "depth", "num_heads")
    known: dict[str, Any] = dict(zip(names, sizes, strict=True))
    return ModelSpec(name, **known, mlp_ratio=4.0, activation="gelu")


def timm_spec(name: str) -> ModelSpec:
    """What timm declares for a download (`NAME[.tag]`), including mean, std, size and crop."""
    from timm.models import get_pretrained_cfg

    check_timm_name(name)
    declared = get_pretrained_cfg(name)
    assert declared is not None
    height, width = declared.input_size[-2:]
    return replace(
        architecture(name),
        img_size=(height, width),
        num_classes=declared.num_classes,
        mean=tuple(declared.mean),
        std=tuple(declared.std),
        resize=int(min(height, width) / declared.crop_pct),
        interpolation=declared.interpolation,  # type: ignore[arg-type]
        checkpoint=f"timm:{name}",
    )


def check_timm_name(name: str) -> None:
    """Raise unless timm has this model and, if the name has one, this tag."""
    import timm

    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        raise _unknown_model(base)
    tagged = timm.list_pretrained(f"{base}.*")
    if tag and name not in tagged:
        raise unknown_name("timm model", name, tagged)


def _unknown_model(name: str) -> UserError:
    import timm

    hint = did_you_mean(name, [*NAMED_MODELS, *_TORCHVISION, *timm.list_models()])
    return UserError(
        f"Unknown model {name!r}.{hint} Available: {', '.join(NAMED_MODELS)}; and timm's ViTs "
        "by their names, such as vit_tiny_patch16_224 or vit_small_patch14_dinov2."
    )


NEEDED = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")
PIXELS = ("mean", "std")
PICTURES = (*PIXELS, "resize", "interpolation", "trained_gamma")
"""What a user may say of a file that states its network's sizes."""
OPTIONS = ("img_size", "num_heads", *PIXELS)  # that `mjp attack` has, for one's own model


def check_complete(
    spec: ModelSpec, source: str, needed: Sequence[str] = (*NEEDED, *PIXELS, "activation")
) -> None:
    """Raise a UserError that says what is missing, unless the spec has all that a model needs."""
    missing = [key for key in needed if getattr(spec, key) is None]
    if not missing:
        return
    options = ", ".join(f"--{key.replace('_', '-')}" for key in missing if key in OPTIONS)
    given = f", or to `mjp attack` as {options}" if options else ""
    raise UserError(
        f"{source}: expected {', '.join(f'{key}=…' for key in missing)}, got none: no checkpoint "
        "shows that, and it is never guessed. Give it to load_model or in the model's part of the "
        f"config{given}."
    )


# checkpoints of a command line --------------------------------------------------------------------

MOST_LETTERS = 100
"""Of a label in a table; a longer one is shortened in its middle."""
GENERIC = ("model", "checkpoint")
"""Names of files that say nothing; the folder's name says what they are."""


@dataclass(frozen=True)
class NamedCheckpoint:
    """A label for tables, and what `load_model` takes as its checkpoint.

    described: whether --model, --mean and --std are about this one
    """

    label: str
    source: str
    described: bool = True


def named_checkpoints(items: Sequence[str], option: str) -> list[NamedCheckpoint]:
    """The checkpoints of a command line, each with its own label.

    named_checkpoints(["cifar_vit", "ours=run/model.safetensors"], "--checkpoint")

    option  what the command line calls them, for messages
    """
    checkpoints = [_named(item, option) for item in items]
    labels = [checkpoint.label for checkpoint in checkpoints]
    if len(set(labels)) < len(labels):
        raise UserError(
            f"Two checkpoints are called {max(labels, key=labels.count)!r}: expected a different "
            f"name for each. Give {option} NAME=PATH NAME=PATH."
        )
    lacking = {
        item.label
        for item in checkpoints  # timm's names stand for all that a checkpoint states
        if not item.source.startswith(TIMM_PREFIX) and "mean" not in read_metadata(item.source)
    }  # where there is none, an option is meant to replace what they state
    return [replace(item, described=not lacking or item.label in lacking) for item in checkpoints]


def _named(item: str, option: str) -> NamedCheckpoint:
    """The label and path of LABEL=PATH; a plain PATH is labelled by its file or folder name."""
    file, label, path = Path(item), item, item
    if "=" in item and not is_there(file):
        label, _, path = item.partition("=")
        if not label or not path:
            raise UserError(f"{option}: expected PATH or LABEL=PATH, got {shown(item)!r}.")
    elif is_there(file) and not file.is_dir():
        label = file.resolve().parent.name if file.stem in GENERIC else file.stem
    source = NAMED_MODELS[path].checkpoint if path in NAMED_MODELS else None
    nearly = path.isidentifier() and not is_there(Path(path)) and did_you_mean(path, NAMED_MODELS)
    if source is None and nearly:
        raise unknown_name("model", path, list(NAMED_MODELS))
    return NamedCheckpoint(shown(label, MOST_LETTERS), source or path)
