"""Models by name: the paper's, those of this package, and timm's ViTs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind, is_there, read_csv, read_mapping
from mjp_privacy.core.registry import Registry, did_you_mean, unknown_name
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import PACKAGED_FOLDER, TIMM_PREFIX, read_metadata
from mjp_privacy.models.spec import ModelSpec

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
        hint = did_you_mean(name, [*NAMED_MODELS, *_TORCHVISION, *_plain_timm_names()])
        raise UserError(
            f"Unknown model {name!r}.{hint} Available: {', '.join(NAMED_MODELS)}; and timm's ViTs "
            "by their names, such as vit_tiny_patch16_224 or vit_small_patch14_dinov2."
        )
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
    any other."""
    sizes = _TORCHVISION.get(name)
    if match := _TIMM_NAME.fullmatch(name):
        sizes = (int(match["size"]), int(match["patch"]), *_WIDTHS[match["width"]])
    if sizes is None:
        return ModelSpec(name)
    fields = ("img_size", "patch_size", "embed_dim", "depth", "num_heads")
    known: dict[str, Any] = dict(zip(fields, sizes, strict=True))
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
        raise unknown_name("timm model", base, _plain_timm_names())
    tagged = timm.list_pretrained(f"{base}.*")
    if tag and name not in tagged:
        raise unknown_name("timm model", name, tagged)


def _plain_timm_names() -> list[str]:
    import timm

    return [name for name in timm.list_models(["vit_*", "deit_*"]) if _TIMM_NAME.fullmatch(name)]


NEEDED = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")
PIXELS = ("mean", "std")
OPTIONS = ("img_size", "num_heads", *PIXELS)  # that `mjp attack` has, for one's own model


def check_complete(
    spec: ModelSpec, source: str, needed: Sequence[str] = (*NEEDED, *PIXELS, "activation")
) -> None:
    """Raise a UserError that says what is missing, unless the spec has all that a model needs."""
    missing = [key for key in needed if getattr(spec, key) is None]
    if not missing:
        return
    options = ", ".join(f"--{key.replace('_', '-')}" for key in missing if key in OPTIONS)
    from timm.models import get_pretrained_cfg, is_model

    pixels = ""  # that timm declares for a plain ViT's weights of this name
    if _TIMM_NAME.fullmatch(spec.name) and is_model(spec.name.partition(".")[0]):
        declared = get_pretrained_cfg(spec.name, allow_unregistered=False)
        known = {key: tuple(getattr(declared, key)) for key in PIXELS} if declared else {}
        pixels = ", ".join(f"{key}={known[key]}" for key in missing if key in known)
    raise UserError(
        f"{source}: {', '.join(missing)} cannot be read off the checkpoint and never guessed. "
        f"Expected {', '.join(f'{key}=…' for key in missing)}, got none. Give that to load_model "
        "or in the model's part of the config"
        + (f", or to `mjp attack` as {options}." if options else ".")
        + (f" timm declares {pixels} for {spec.name}, if the client used that." if pixels else "")
    )


# checkpoints of a command line --------------------------------------------------------------------

MOST_LETTERS = 100
"""Of a label in a table; a longer one is shortened in its middle."""
GENERIC = ("model", "model_float16", "checkpoint")
"""Names of files that say nothing; the folder's name says what they are."""


@dataclass(frozen=True)
class NamedCheckpoint:
    """A label for tables, and what `load_model` takes as its checkpoint.

    described: whether --model, --mean and --std are about this one
    """

    label: str
    source: str
    described: bool = True

    def options(self, *values: Any) -> tuple[Any, ...]:
        """What these options mean for this checkpoint: nothing, if they are about others.

        name, mean, std = checkpoint.options(arguments.model, arguments.mean, arguments.std)
        """
        return values if self.described else (None,) * len(values)


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


TABLE = FileKind("a table of models", "Give another --out.", 1 << 30)
ESCAPE = "'"  # before a label that a spreadsheet would take for a formula


def keep_earlier(
    out: Path, name: str, checkpoints: Sequence[NamedCheckpoint], column: str = "model"
) -> None:
    """Raise where the CSV `name` in `out` has a model that is not among these: its figures would be
    lost. A command that is given again may replace its own.

    keep_earlier(Path("out"), "summary.csv", named_checkpoints(["cifar_vit"], "--checkpoint"))

    column: of the labels; lines of another `kind` than "model" do not count
    """
    path = out / name
    if not path.is_file():
        return
    rows = [row for row in read_csv(path, TABLE, [column]) if row.get("kind", "model") == "model"]
    there = list(dict.fromkeys(row[column].removeprefix(ESCAPE) for row in rows))
    labels = [checkpoint.label.removeprefix(ESCAPE) for checkpoint in checkpoints]
    if others := [shown(label, 100) for label in there if label not in labels]:
        raise UserError(
            f"--out {shown(out)} holds {name} with {', '.join(others)}, and this command is about "
            f"{', '.join(labels)}: what stands there would be lost. Give another --out, name "
            "those models too, or move the folder away."
        )
