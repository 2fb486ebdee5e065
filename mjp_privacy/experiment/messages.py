"""What is told of a run while it goes on: by `work` in this process, or by a worker elsewhere.

Messages hold no rows and no pictures; these are on disk before a `CellDone` is sent. A worker
writes each message as one line of a file (`line_of`), which the coordinator reads (`message_of`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mjp_privacy.experiment.block import ImageNote
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.models.checkpoints import CheckpointReport


@dataclass(frozen=True)
class ModelOpened:
    """A model was loaded, or could not be: now all facts of its cells are known."""

    model: str
    facts: Sequence[CellFacts]
    report: CheckpointReport | None  # None: it could not be loaded
    reason: str = ""  # why not
    trace: str = ""  # the traceback, where it is no user's mistake


@dataclass(frozen=True)
class BlockSkipped:
    """Units of a block that an earlier command finished."""

    units: int
    of_other_code: Mapping[str, int] = field(default_factory=dict)
    """How many of them other code made, by run_id of their cell."""
    unrecorded: Mapping[str, int] = field(default_factory=dict)
    """How many were made by code that was not recorded, by run_id of their cell."""


@dataclass(frozen=True)
class BlockRead:
    """A block's images were read."""

    run_id: str  # of the block's first cell, under which the time is recorded
    notes: Sequence[ImageNote]
    seconds: float

    @property
    def usable(self) -> int:
        """How many of the images can be attacked."""
        return sum(not note.reason for note in self.notes)


@dataclass(frozen=True)
class CellDone:
    """One cell's rows and pictures of one block are on disk."""

    run_id: str
    model: str
    setting: str
    dtype: str
    block: int
    units: int  # number of images that were not finished before
    images: int  # number of images that were attacked
    failed: Mapping[str, str] = field(default_factory=dict)  # images, with the reason
    refused: Mapping[str, int] = field(default_factory=dict)  # reasons, with the number of images
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage
    remark: str = ""  # what is said of it while the run goes on
    elsewhere: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Images that files of other blocks hold too, by block: there they are to be removed."""
    traces: Mapping[str, str] = field(default_factory=dict)  # tracebacks, by reason of `failed`


@dataclass(frozen=True)
class TaskEnded:
    """A worker has finished a block in all cells of a model, or met an error that is a bug."""

    error: str = ""  # the error and where it came from, as Python shows it
    storage: int = 0
    """The system's number of the error where a disk did not take what was written: that ends the
    run, and `error` says which file it was."""


Message = ModelOpened | BlockSkipped | BlockRead | CellDone | TaskEnded

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (ModelOpened, BlockSkipped, BlockRead, CellDone, TaskEnded)
}


def line_of(message: Message) -> str:
    """The message as one line of text; `message_of` reads it."""
    name = type(message).__name__
    return json.dumps([name, _adapter(name).dump_python(message, mode="json")]) + "\n"


def message_of(line: str) -> Message:
    """The message of a line; ValueError if it is not one."""
    try:
        name, content = json.loads(line)
    except (TypeError, RecursionError) as error:  # a number; a thousand brackets
        raise ValueError("no name and content") from error
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(f"no message is called {name!r}")
    message: Message = _adapter(name).validate_python(content)
    return message


@cache
def _adapter(name: str) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(_KINDS[name])
