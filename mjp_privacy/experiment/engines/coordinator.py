"""Hands out a run's tasks to an engine and listens to what their workers say.

    Engine.submit(tasks)          somebody does them, in any order
    RUN/work/M-B.K.S.jsonl        each worker says here what is done
    Engine.lost()                 tasks whose worker is gone: they are given again

Nothing else goes between the two, so an engine needs to carry paths and numbers alone. The
coordinator is the only one that writes what is about the whole run (`save.RunLedger`).
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from mjp_privacy.core.errors import StorageError
from mjp_privacy.core.files import check_disk, check_folder
from mjp_privacy.experiment.job import Job, Task
from mjp_privacy.experiment.messages import (
    BlockSkipped,
    CellDone,
    Message,
    ModelOpened,
    TaskEnded,
    message_of,
)

ATTEMPTS = 3  # times that a task is given to a worker


class Engine(Protocol):
    """Does tasks somewhere. Methods return at once."""

    @property
    def interval(self) -> float:
        """Seconds between two looks at what workers say."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Have these tasks done, together with those that were given before."""

    def lost(self) -> Sequence[tuple[Task, str]]:
        """Tasks that ended without an answer since the last call, and what became of their worker.

        A task may be named that did answer: what it said counts.
        """

    def close(self) -> None:
        """Stop all workers; tasks that are not done stay undone."""


@dataclass(frozen=True)
class TaskLost:
    """A task that no worker finished, after several tries or because of an error."""

    model: str
    block: int
    reason: str


@dataclass
class Coordinator:
    """One run's tasks and what was heard of them: Coordinator(...).messages(tasks)."""

    job: Job
    models: Sequence[str]  # of the plan, in order
    engine: Engine
    opened: frozenset[str] = frozenset()  # models that were told of before
    _open: dict[tuple[int, int], Task] = field(default_factory=dict, init=False)
    _read: dict[str, int] = field(default_factory=dict, init=False)  # bytes, by file
    _units: Counter[tuple[int, int]] = field(default_factory=Counter, init=False)
    """How many units were told of, by task."""
    _cells: set[tuple[int, int, str]] = field(default_factory=set, init=False)
    """Tasks and run_ids of which a result was told."""

    def __post_init__(self) -> None:
        self._opened = set(self.opened)

    @property
    def folder(self) -> Path:
        """Where workers say what is done."""
        return self.job.path.parent

    def messages(self, tasks: Sequence[Task]) -> Iterator[Message | TaskLost]:
        """Have the tasks done and pass on what is said, until all of them are over."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier command
        self.folder.mkdir(parents=True)
        self.job.write()
        self._open = {task.key: task for task in tasks}
        try:
            self.engine.submit(tasks)
            while self._open:
                check_folder(self.folder)
                lost = self.engine.lost()  # asked first: what they said before is read below
                heard = list(self._heard())
                yield from heard
                yield from self._given_again(lost)
                if not heard:
                    time.sleep(self.engine.interval)
        finally:
            self.engine.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _heard(self) -> Iterator[Message | TaskLost]:
        for file in sorted(self.folder.glob("*.jsonl")):
            task = Task.of_file(file.name)
            if self._open.get(task.key) != task:  # a try that was given up
                continue
            for message in self._new_in(file):
                if isinstance(message, TaskEnded):
                    del self._open[task.key]
                    file.unlink()
                    if message.storage:
                        raise StorageError(message.error, message.storage)
                    if message.error:
                        yield self._failed(task, message.error.strip())
                elif (news := self._news(message, task)) is not None:
                    yield news

    def _new_in(self, file: Path) -> Iterator[Message]:
        """What was said in this file since it was last read; a line may not be whole yet."""
        with file.open("rb") as content:
            content.seek(self._read.get(file.name, 0))
            lines = content.read().split(b"\n")
        for line in lines[:-1]:
            self._read[file.name] = self._read.get(file.name, 0) + len(line) + 1
            yield message_of(line.decode())

    def _news(self, message: Message, task: Task) -> Message | None:
        """What a message says that was not said before: each worker tells of the model that it
        opened, and a second start finds finished what the first one did, or does it again where
        images failed."""
        if isinstance(message, ModelOpened):
            is_new = message.model not in self._opened
            self._opened.add(message.model)
            return message if is_new else None
        if isinstance(message, BlockSkipped):
            message = replace(message, units=max(0, message.units - self._units[task.key]))
        elif isinstance(message, CellDone):
            if (*task.key, message.run_id) in self._cells:
                message = replace(message, units=0)
            self._cells.add((*task.key, message.run_id))
        if isinstance(message, BlockSkipped | CellDone):
            self._units[task.key] += message.units
        return message

    def _given_again(self, lost: Sequence[tuple[Task, str]]) -> Iterator[TaskLost]:
        if lost:  # a worker whose disk is full cannot say so
            check_disk(self.folder)
        again = []
        for task, reason in lost:
            if self._open.get(task.key) != task:
                continue
            if task.attempt >= ATTEMPTS:
                del self._open[task.key]
                yield self._failed(task, f"{reason}, {ATTEMPTS} times")
                continue
            self._open[task.key] = task.once_more()
            again.append(self._open[task.key])
        if again:
            self.engine.submit(again)

    def _failed(self, task: Task, reason: str) -> TaskLost:
        return TaskLost(self.models[task.model], task.block, reason)
