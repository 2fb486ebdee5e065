"""The files a run keeps: a checkpoint to continue from, and the finished model for others."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from mjp_privacy.core.errors import BadFile, UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.read import FileKind, is_there, json_value, typed
from mjp_privacy.core.schema import Whole
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import CHECKPOINT as WEIGHTS
from mjp_privacy.models.families import SIZES, weights_of
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.models.tensor_files import TensorFile, check_digest, read_torch_file, save_tensors
from mjp_privacy.training.config import TrainingConfig, other_sizes, plain

IDENTITY = {
    "images": "training images or labels (--data)",
    "validation": "validation images or labels (--val)",
    "initial": "weights to start from (--initial)",
}
"""The parts of a run's identity besides its config, as error messages call them."""

CHECKPOINT, MODEL, HALF = "checkpoint.pt", "model.safetensors", "model_float16.safetensors"


TASK = "task"
"""The entry of a model's metadata that names another task than classification."""

STATE = FileKind(
    f"the {CHECKPOINT} of an earlier run of this command, complete and as it was written",
    "Give another --out, or remove that file to start anew.",
    1 << 40,
)
Words = Annotated[str, Field(strict=True, max_length=1 << 20)]


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class _Head:
    """What every checkpoint holds, of a training or a federation."""

    config: Words
    images: Words
    validation: Words
    initial: Words
    step: Whole
    model: dict[str, Any]
    optimizer: dict[str, Any]


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write checkpoint.pt; the previous one stays until the new one is complete."""
    write_atomically(folder / CHECKPOINT, lambda path: torch.save(state, path), durable=True)


def load_checkpoint(
    folder: Path, identity: Mapping[str, str], *, without: Collection[str] = ()
) -> dict[str, Any] | None:
    """The state of the run in this folder, or None if there is none.

    A run of another config or other images is an error.

    without: fields of a stored config that decide nothing of the training
    """
    path = folder / CHECKPOINT
    if not is_there(path):
        return None
    state = read_torch_file(path, STATE, own=True)
    head = typed(state, path, STATE, _Head)
    before, now = json_value(head.config, path, STATE), json.loads(identity["config"])
    if not isinstance(before, dict):
        raise STATE.refusal(path, "a config without fields", "config")
    before = {name: value for name, value in before.items() if name not in without}
    if before != now:
        raise UserError(
            f"--out holds a run of another config: {difference(before, now)}. Expected the same "
            "config; give another --out."
        )
    for key, what in IDENTITY.items():
        if getattr(head, key) != identity[key]:
            raise UserError(
                f"--out holds a run with other {what} than this command: expected those that it "
                "began with. Give the same, or another --out."
            )
    return dict(state)


def export_model(
    folder: Path,
    model: MJPVisionTransformer,
    config: TrainingConfig,
    facts: dict[str, Any],
    *,
    half: bool = False,
    name: str = MODEL,
) -> Path:
    """Write the weights as safetensors; their metadata holds all that `load_model` needs as JSON,
    and the file its own digest.

    facts  further metadata
    half   store float16
    """
    tensors = exported(model, half=half)
    metadata = {k: json.dumps(v) for k, v in {**_metadata(config), **facts}.items()}
    path = folder / name
    save_tensors(path, tensors, metadata, digest=True)
    return path


def exported(model: MJPVisionTransformer, *, half: bool) -> dict[str, Tensor]:
    """The weights as a file has them."""
    kind = torch.float16 if half else torch.float32
    return {
        key: value.detach().to("cpu", kind).contiguous() for key, value in weights_of(model).items()
    }


def export_fault(path: Path, model: MJPVisionTransformer, *, half: bool) -> str:
    """Why a file that was exported is not the one of this model any more; empty if it is."""
    try:
        check_digest(path, WEIGHTS)
        stored = TensorFile(path, WEIGHTS).tensors()
    except BadFile as error:
        return error.got
    parameters = exported(model, half=half)
    same = stored.keys() == parameters.keys() and all(
        tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name])
        for name, tensor in parameters.items()
    )
    return "" if same else "other weights than those that were trained"


def _metadata(config: TrainingConfig) -> dict[str, Any]:
    shape = config.model
    positions = "N(0, 1)" if config.positions_as_paper else "N(0, 0.02²)"
    memory = config.data.store == "memory"
    arch = f"vit d{shape.embed_dim} l{shape.depth} h{shape.num_heads} p{shape.patch_size}"
    sizes = other_sizes(config)
    classifies = config.task == "classification"
    other: dict[str, Any] = {} if classifies else {TASK: config.task}
    if sizes is not None and classifies:
        other[SIZES] = sizes.stated()
    if shape.dal == "pca" and classifies:  # the one kind that no tensor shows
        other["dal"] = shape.dal
    return {
        **other,
        "name": config.name,
        "arch": arch if sizes is None else str(sizes),
        "img_size": shape.img_size,
        "resize": shape.img_size if memory else None,
        "num_heads": shape.num_heads,
        "num_classes": shape.num_classes,
        "mean": shape.mean,
        "std": shape.std,
        "position_embedding": "exposed" if shape.position_embedding == "none" else "learned",
        "first_block": shape.first_block,
        "trained_gamma": _trained_gamma(config),
        "position_start": "initial" if config.initial else positions,
        "position_decay": config.positions_as_paper and classifies,
        "seed": config.seed,
        "recipe": plain(config),
    }


def _trained_gamma(config: TrainingConfig) -> float | None:
    """The shuffle ratio; None where it says nothing: SPP shuffles all, a checkpoint had its own."""
    if config.jigsaw.shuffle == "patches":
        return config.jigsaw.gamma
    return None if config.jigsaw.shuffle != "none" or config.initial else 0.0


def difference(before: Any, now: Any, place: str = "") -> str:
    """The first field that differs, with both values: "recipe.lr was 0.1 and is 0.2"."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                return difference(before.get(key), now.get(key), f"{place}.{key}".strip("."))
    return f"{place} was {before!r} and is {now!r}"


# what a checkpoint holds, compared with what it is put into ---------------------------------------

Percent = Annotated[float, Field(strict=True, ge=0, le=100)]
Real = Annotated[float, Field(strict=True)]
MOVING = {"lr", "initial_lr"}
"""Fields of an optimiser's group that follow from the step."""


@dataclass(frozen=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class _MadeWith:
    commit: Annotated[str, Field(max_length=200)]


LINE = frozenset(
    ("step", "epoch", "loss", "cross_entropy", "dal", "accuracy", "gradient_norm", "lr", "timing")
)
"""Fields of a line of metrics.jsonl without a validation."""


@dataclass(frozen=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class Resumed:
    """How far a training had come, and with what.

    unvalidated  the last step's line of metrics.jsonl, where its validation is still to come
    """

    step: Whole
    made_with: Annotated[list[_MadeWith], Field(max_length=10_000)]
    average: dict[str, Any] | None
    unvalidated: dict[str, Whole | Real | dict[str, Real]] | None = None
    val_top1: Percent | None = None
    val_miou: Percent | None = None


def resumed(state: Mapping[str, Any], path: Path, steps: int, measure: str) -> Resumed:
    """The typed part of a checkpoint of a training with so many steps, whose learner has this
    `measure`."""
    found = typed(state, path, STATE, Resumed)
    if measure not in state:
        raise STATE.refusal(path, "no such field", measure)
    if found.step > steps:
        raise STATE.refusal(path, f"step {found.step} of a training of {steps} steps", "step")
    line = found.unvalidated
    if line is not None and (line.keys() != LINE or line["step"] != found.step):
        raise STATE.refusal(path, f"no line of step {found.step}", "unvalidated")
    return found


def check_weights(stored: Any, expected: Mapping[str, Tensor], path: Path, field: str) -> None:
    """Raise unless these are tensors of the same names, shapes and types, all finite."""
    if not isinstance(stored, Mapping) or stored.keys() != expected.keys():
        names = sorted(map(str, stored)) if isinstance(stored, Mapping) else []
        other = next((n for n in names if n not in expected), "too few names")
        raise STATE.refusal(path, f"tensors of another model ({shown(other, 60)})", field)
    for name, tensor in expected.items():
        found = stored[name]
        if not isinstance(found, Tensor):
            raise STATE.refusal(path, f"{type(found).__name__} in place of a tensor", name)
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            got = f"{tuple(found.shape)} of {found.dtype} where {tuple(tensor.shape)} of "
            raise STATE.refusal(path, f"{got}{tensor.dtype} is trained", name)
        if not bool(found.isfinite().all()):
            raise STATE.refusal(path, "numbers that are NaN or infinite", name)


def check_optimizer(stored: Any, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Raise unless this is a state of the same optimiser over the same parameters."""
    fresh = optimizer.state_dict()
    groups = stored.get("param_groups") if isinstance(stored, Mapping) else None
    states = stored.get("state") if isinstance(stored, Mapping) else None
    alike = isinstance(groups, list) and len(groups) == len(fresh["param_groups"])
    if not alike or not isinstance(states, Mapping):
        raise STATE.refusal(path, "no state of this optimiser", "optimizer")
    for group, own in zip(groups or [], fresh["param_groups"], strict=True):
        if not isinstance(group, Mapping) or group.get("params") != own["params"]:
            raise STATE.refusal(path, "a group of other parameters", "optimizer")
        for name in sorted(own.keys() & group.keys() - MOVING):
            if type(group[name]) is not type(own[name]) or group[name] != own[name]:
                got = f"{name} {shown(repr(group[name]), 60)}, not {own[name]!r}"
                raise STATE.refusal(path, got, "optimizer")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, state in states.items():
        fits = type(number) is int and 0 <= number < len(parameters) and isinstance(state, Mapping)
        if not fits or not all(_fits(value, parameters[number]) for value in state.values()):
            raise STATE.refusal(path, f"no moments of parameter {shown(number, 20)}", "optimizer")


def _fits(value: Any, parameter: Tensor) -> bool:
    """Whether a value of an optimiser's state is a step, or a moment of this parameter."""
    if not isinstance(value, Tensor) or not bool(value.isfinite().all()):
        return False
    return value.ndim == 0 or value.shape == parameter.shape
