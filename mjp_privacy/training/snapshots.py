"""The files a run keeps: a checkpoint to continue from, and the finished model for others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
from mjp_privacy.models.checkpoint_files import file_sha256, located
from mjp_privacy.models.families import SIZES, weights_of
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.models.tensor_files import (
    TensorFile,
    check_digest,
    check_finite,
    read_torch_file,
    save_tensors,
)
from mjp_privacy.training.config import Initial, TrainingConfig, other_sizes, plain
from mjp_privacy.training.journal import Percent

CHECKPOINT, MODEL, HALF = "checkpoint.pt", "model.safetensors", "model_float16.safetensors"

# a checkpoint -------------------------------------------------------------------------------------

IDENTITY = {
    "images": "training images or labels (--data)",
    "validation": "validation images or labels (--val)",
    "initial": "weights to start from (--initial)",
}
"""The parts of a run's identity besides its config, as error messages call them."""
STATE = FileKind(
    f"the {CHECKPOINT} of an earlier run of this command, complete and as it was written",
    "Give another --out, or remove that file to start anew.",
    1 << 40,
)
Words = Annotated[str, Field(strict=True, max_length=1 << 20)]
Real = Annotated[float, Field(strict=True)]
LENIENT = ConfigDict(extra="ignore", allow_inf_nan=False, arbitrary_types_allowed=True)


@dataclass(frozen=True, config=LENIENT, kw_only=True)
class Checkpoint:
    """What every checkpoint holds, of a training or a federation."""

    config: Words
    images: Words
    validation: Words
    initial: Words
    step: Whole
    model: dict[str, Tensor]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Line:
    """A line of metrics.jsonl without a validation."""

    step: Whole
    epoch: Real
    loss: Real
    cross_entropy: Real
    dal: Real
    accuracy: Real
    gradient_norm: Real
    lr: Real
    timing: dict[str, Real]


@dataclass(frozen=True, config=LENIENT, kw_only=True)
class TrainingCheckpoint(Checkpoint):
    """How far a training had come, and with what.

    unvalidated  the last step's line of metrics.jsonl, where its validation is still to come
    """

    optimizer: dict[str, Any]
    average: dict[str, Tensor] | None
    made_with: list[dict[str, Any]]
    unvalidated: Line | None = None
    val_top1: Percent | None = None
    val_miou: Percent | None = None


Kind = TypeVar("Kind", bound=Checkpoint)


def identity_of(
    config: Mapping[str, Any], examples: Any, held_out: Any | None, initial: Initial | None
) -> dict[str, str]:
    """What decides a run's numbers; a checkpoint is continued only if all of it is the same."""
    start = located(initial.checkpoint) if initial else None
    return {
        "config": json.dumps(config),
        "images": examples.digest(),
        "validation": held_out.digest() if held_out else "none",
        "initial": file_sha256(start) if start and start.is_file() else "none",
    }


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write checkpoint.pt; the previous one stays until the new one is complete."""
    write_atomically(folder / CHECKPOINT, lambda path: torch.save(state, path), durable=True)


def load_checkpoint(
    folder: Path, identity: Mapping[str, str], kind: type[Kind], steps: int
) -> Kind | None:
    """The state of the run of so many steps in this folder, or None if there is none. A run of
    another config or other images is an error."""
    path = folder / CHECKPOINT
    if not is_there(path):
        return None
    stored = typed(read_torch_file(path, STATE, own=True), path, STATE, kind)
    check_config(json_value(stored.config, path, STATE), json.loads(identity["config"]))
    for key, what in IDENTITY.items():
        if getattr(stored, key) != identity[key]:
            raise UserError(
                f"--out holds a run with other {what} than this command: expected those that it "
                "began with. Give the same, or another --out."
            )
    if stored.step > steps:
        raise STATE.refusal(path, f"step {stored.step} of {steps} steps", "step")
    return stored


def check_config(before: Any, now: Any) -> None:
    """Raise unless the run in --out has this config; the first field that differs is named."""
    place = ""
    while before != now:
        if not (isinstance(before, dict) and isinstance(now, dict)):
            raise UserError(
                f"--out holds a run of another config: {place} was {before!r} and is {now!r}. "
                "Expected the same config; give another --out."
            )
        name = next(n for n in sorted({*before, *now}) if before.get(n) != now.get(n))
        before, now, place = before.get(name), now.get(name), f"{place}.{name}".strip(".")


def check_weights(stored: Any, like: Mapping[str, Tensor], path: Path, field: str) -> None:
    """Raise unless these are finite tensors of the same names, shapes and types."""
    with STATE.reading(path):
        if stored.keys() != like.keys():
            other = ", ".join(sorted(map(str, stored.keys() ^ like.keys())))
            raise STATE.refusal(path, f"tensors of another model ({shown(other, 60)})", field)
        for name, tensor in like.items():
            found = stored[name]
            if getattr(found, "shape", None) != tensor.shape or found.dtype != tensor.dtype:
                got = f"something else than {tuple(tensor.shape)} numbers of {tensor.dtype}"
                raise STATE.refusal(path, got, f"{field}, {name}")
        check_finite({f"{field}, {name}": stored[name] for name in like}, path, STATE)


# the finished model -------------------------------------------------------------------------------


def export_model(
    folder: Path, model: MJPVisionTransformer, config: TrainingConfig, facts: dict[str, Any]
) -> Path:
    """Write the weights as safetensors, once in float32 and once in float16; the first one's path.

    The metadata holds all that `load_model` needs as JSON, and each file its own digest.
    facts: further metadata.
    """
    shape, jigsaw = config.model, config.jigsaw
    gamma: float | None = jigsaw.gamma
    if jigsaw.shuffle != "patches":  # SPP shuffles all, and a checkpoint had its own ratio
        gamma = None if jigsaw.shuffle != "none" or config.initial else 0.0
    positions = "N(0, 1)" if config.positions_as_paper else "N(0, 0.02²)"
    memory = config.data.store == "memory"
    arch = f"vit d{shape.embed_dim} l{shape.depth} h{shape.num_heads} p{shape.patch_size}"
    sizes = other_sizes(config)
    classifies = config.task == "classification"
    other: dict[str, Any] = {} if classifies else {"task": config.task}
    if sizes is not None and classifies:
        other[SIZES] = sizes.stated()
    if shape.dal == "pca" and classifies:  # the one kind that no tensor shows
        other["dal"] = shape.dal
    stated = {
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
        "trained_gamma": gamma,
        "position_start": "initial" if config.initial else positions,
        "position_decay": config.positions_as_paper and classifies,
        "seed": config.seed,
        "recipe": plain(config),
        **facts,
    }
    metadata = {name: json.dumps(fact) for name, fact in stated.items()}
    for name, tensors in exported(model):
        save_tensors(folder / name, tensors, metadata, digest=True)
    return folder / MODEL


def exported(model: MJPVisionTransformer) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The names of the files, each with the weights as it has them."""
    for name, kind in ((MODEL, torch.float32), (HALF, torch.float16)):
        kept = weights_of(model).items()
        yield name, {key: value.detach().to("cpu", kind).contiguous() for key, value in kept}


def export_fault(path: Path, expected: Mapping[str, Tensor]) -> str:
    """Why a file is not the one of these weights any more; empty if it is."""
    try:
        check_digest(path, WEIGHTS, needed=True)
        stored = TensorFile(path, WEIGHTS).tensors()
    except BadFile as error:
        return error.got
    same = stored.keys() == expected.keys() and all(
        tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name])
        for name, tensor in expected.items()
    )
    return "" if same else "other weights than those that were trained"
