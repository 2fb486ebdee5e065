"""What a checkpoint holds, compared with what it is put into before any of it is.

The file is this trainer's own and its checksums were verified, so this tells a checkpoint of other
code, or one that somebody edited, from one that training goes on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from mjp_privacy.core.read import typed
from mjp_privacy.core.schema import Whole
from mjp_privacy.core.text import shown
from mjp_privacy.training.snapshots import STATE

Percent = Annotated[float, Field(strict=True, ge=0, le=100)]
Real = Annotated[float, Field(strict=True)]
MOVING = ("lr", "initial_lr", "params")
"""Fields of an optimiser's group that follow from the step, or number its parameters."""


@dataclass(frozen=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class _MadeWith:
    commit: Annotated[str, Field(max_length=200)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class _Timing:
    images_per_s: Real
    seconds_per_step: Real
    waiting: Real


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class _Line:
    step: Whole
    epoch: Real
    loss: Real
    cross_entropy: Real
    dal: Real
    accuracy: Real
    gradient_norm: Real
    lr: Real
    timing: _Timing


@dataclass(frozen=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class Resumed:
    """How far a training had come, and with what.

    unvalidated  the last step's line of metrics.jsonl, where its validation is still to come
    """

    step: Whole
    made_with: Annotated[list[_MadeWith], Field(max_length=10_000)]
    average: dict[str, Any] | None
    unvalidated: _Line | None = None
    val_top1: Percent | None = None
    val_miou: Percent | None = None

    def score(self, measure: str) -> float | None:
        """The last validation, under the name of a learner's `measure`."""
        score: float | None = getattr(self, measure)
        return score


def resumed(state: Mapping[str, Any], path: Path, steps: int, measure: str) -> Resumed:
    """The typed part of a checkpoint of a training with so many steps, whose learner has this
    `measure`."""
    found = typed(state, path, STATE, Resumed)
    if measure not in state:
        raise STATE.refusal(path, "no such field", measure)
    if found.step > steps:
        raise STATE.refusal(path, f"step {found.step} of a training of {steps} steps", "step")
    if found.unvalidated is not None and found.unvalidated.step != found.step:
        raise STATE.refusal(path, f"a line of step {found.unvalidated.step}", "unvalidated.step")
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
        fields = own.keys() & group.keys() if isinstance(group, Mapping) else set()
        fixed = [name for name in sorted(fields) if name not in MOVING]
        if other := [name for name in fixed if not _equal(group[name], own[name])]:
            got = f"{other[0]} {shown(repr(group[other[0]]), 60)}, not {own[other[0]]!r}"
            raise STATE.refusal(path, got, "optimizer")
        if "params" not in fields or group["params"] != own["params"]:
            raise STATE.refusal(path, "a group of other parameters", "optimizer")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, state in states.items():
        fits = type(number) is int and 0 <= number < len(parameters) and isinstance(state, Mapping)
        if not fits or not all(_fits(value, parameters[number]) for value in state.values()):
            raise STATE.refusal(path, f"no moments of parameter {shown(number, 20)}", "optimizer")


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _fits(value: Any, parameter: Tensor) -> bool:
    """Whether a value of an optimiser's state is a step, or a moment of this parameter."""
    if not isinstance(value, Tensor) or not bool(value.isfinite().all()):
        return False
    return value.ndim == 0 or value.shape == parameter.shape
