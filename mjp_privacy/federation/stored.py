"""What a federation finds in its own folder, checked before it is used.

    federation.json   its config        stored_config(folder)
    metrics.jsonl     its evaluations   evaluations(folder)
    checkpoint.pt     where it stopped  StoredState.of(state, ...)

Attacks are no part of what was trained: with other ones the same folder goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from mjp_privacy.core.errors import BadFile
from mjp_privacy.core.read import FileKind, read_json, read_json_lines
from mjp_privacy.core.schema import NotNegative, Whole, listed_mistakes, schema
from mjp_privacy.core.text import shown
from mjp_privacy.federation.config import FederationConfig, plain
from mjp_privacy.federation.server import ServerState, Weights
from mjp_privacy.training.journal import METRICS
from mjp_privacy.training.snapshots import CHECKPOINT

RESOLVED = "federation.json"
AFTER_TRAINING = ("attacks",)
"""Fields of a config that decide nothing of the training."""

CONFIG = FileKind(
    "the config that `mjp federate` wrote", "Give another --out, or delete this folder.", 1 << 20
)
LINES = FileKind(
    "a line for each evaluation, as `mjp federate` writes them",
    "Delete the line that is wrong; the others still hold.",
)
STATE = FileKind(
    "the state of a federation that was stopped",
    "Delete this file, and the federation starts at round 0 again.",
    1 << 40,
)
Percent = Annotated[float, Field(strict=True, ge=0, le=100)]


@schema
class Evaluation:
    """A line of metrics.jsonl: the federation after some rounds."""

    step: Whole
    round: Whole
    val_top1: Percent | None
    moved: NotNegative | None = None
    val_images: Whole = 0
    timing: dict[str, Any] | None = None


def stored_config(folder: Path) -> FederationConfig:
    """The config of the federation in this folder."""
    return read_json(folder / RESOLVED, CONFIG, FederationConfig)


def training_part(config: FederationConfig) -> dict[str, Any]:
    """The config without what decides nothing of the training."""
    return {name: value for name, value in plain(config).items() if name not in AFTER_TRAINING}


def evaluations(folder: Path) -> list[Evaluation]:
    """All complete lines of the folder's metrics.jsonl; one that is no evaluation is an error, and
    so is one that changed after it was written."""
    path = folder / METRICS
    lines = []
    for number, line in enumerate(read_json_lines(path, LINES), 1):
        try:
            lines.append(TypeAdapter(Evaluation).validate_python(line))
        except ValidationError as error:
            got = listed_mistakes(error, Evaluation, {})
            what = f"{shown(path)}, evaluation {number}: expected {LINES.expected}; got {got}"
            raise BadFile(path, f"{what}\n{LINES.do}", got) from error
    return lines


@dataclass(frozen=True)
class StoredState:
    """A checkpoint of a federation: its round, its weights, the server's optimiser."""

    round: int
    weights: Weights
    server: ServerState
    seconds: float

    @classmethod
    def of(
        cls, state: Mapping[str, Any], like: Mapping[str, Tensor], rounds: int, folder: Path
    ) -> StoredState:
        """The state that `load_checkpoint` gave; UserError where it is not one of this model.

        like: the federation's weights before round 0
        """
        path = folder / CHECKPOINT
        optimizer = state["optimizer"]
        step, seconds = state["step"], state.get("seconds")
        if not isinstance(optimizer, Mapping) or type(optimizer.get("step")) is not int:
            raise STATE.refusal(path, "no state of a server's optimiser", "optimizer")
        if type(step) is not int or not 0 <= step <= rounds:
            raise STATE.refusal(path, f"{shown(repr(step), 60)} of {rounds} rounds", "step")
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e12:
            raise STATE.refusal(path, shown(repr(seconds), 60), "seconds")
        moments = (_checked(optimizer.get(name), like, path, name) for name in ("first", "second"))
        weights = _checked(state["model"], like, path, "model")
        if missing := sorted(like.keys() - weights.keys()):
            raise STATE.refusal(path, f"no tensor {missing[0]}", "model")
        return cls(step, weights, ServerState(optimizer["step"], *moments), float(seconds))


def _checked(tensors: Any, like: Mapping[str, Tensor], path: Path, field: str) -> Weights:
    """Tensors of the model's parameters, of their shapes and types, all finite."""
    if not isinstance(tensors, Mapping):
        raise STATE.refusal(path, f"{type(tensors).__name__} in place of tensors by name", field)
    for name, tensor in tensors.items():
        if name not in like or not isinstance(tensor, Tensor):
            raise STATE.refusal(path, f"{shown(name, 60)}, which is no parameter", field)
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            shape = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise STATE.refusal(path, f"{shape}; it is {tuple(like[name].shape)}", name)
        if not bool(tensor.isfinite().all()):
            raise STATE.refusal(path, "numbers that are NaN or infinite", name)
    return dict(tensors)
