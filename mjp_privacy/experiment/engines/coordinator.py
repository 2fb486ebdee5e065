"""Hands out a run's tasks to an engine and watches what their workers tell.

    Engine.submit(tasks)      somebody does them, in any order
    RUN/work/M-B-G.K.json     each worker tells here what is done (`job.TaskReport`)
    Engine.lost()             tasks whose worker is gone: they are given again

Nothing else goes between the two, so an engine needs to carry paths and numbers alone. That a task
is done shows in the run folder: a task that is given again finds what is there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from mjp_privacy.core.errors import StorageError
from mjp_privacy.core.files import check_disk
from mjp_privacy.core.held import check_folder
from mjp_privacy.experiment.job import Job, Task, TaskReport
from mjp_privacy.experiment.work import Progress

ATTEMPTS = 3  # times that a task is given to a worker
SHARED = "expected a file system that all machines share"


class Lost(NamedTuple):
    """A task whose worker has ended, and what became of it."""

    task: Task
    reason: str
    wait: float = 0.0  # seconds in which its answer may still be on its way through a file system


class Engine(Protocol):
    """Does tasks somewhere. Methods return at once."""

    @property
    def interval(self) -> float:
        """Seconds between two looks at what workers tell."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Have these tasks done, together with those that were given before."""

    def lost(self) -> Sequence[Lost]:
        """Tasks whose worker ended since the last call. One may be named that did answer: what it
        told counts."""

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
    """One run's tasks and what was told of them.

    with Coordinator(job, models, engine) as coordinator:
        coordinator.submit(tasks)
        for news in coordinator.wait(): ...
    """

    job: Job
    models: Sequence[str]  # of the plan, in order
    engine: Engine
    _open: dict[str, Task] = field(default_factory=dict, init=False)  # by the name of their file
    _lost: dict[str, tuple[float, str]] = field(default_factory=dict, init=False)
    """When open tasks without a worker are given again, and what became of it."""
    _counted: dict[tuple[int, int, int], int] = field(default_factory=dict, init=False)
    """The images of each task that were passed on, however often it started."""
    _said: set[tuple[str, str]] = field(default_factory=set, init=False)
    _read: dict[str, tuple[int, int, int]] = field(default_factory=dict, init=False)
    """The state in which a task's file was read last."""

    @property
    def folder(self) -> Path:
        """Where workers tell what is done."""
        return self.job.path.parent

    def __enter__(self) -> Coordinator:
        shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier command
        self.folder.mkdir(parents=True)
        self.job.write()
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()
        if error[0] is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def submit(self, tasks: Sequence[Task]) -> None:
        """Have these tasks done."""
        self._open |= {task.file_name: task for task in tasks}
        if tasks:
            self.engine.submit(tasks)

    def wait(self) -> Iterator[Progress | TaskLost]:
        """What is told until all tasks are over."""
        while self._open:
            news = list(self.news())
            yield from news
            if not news:
                time.sleep(self.engine.interval)

    def news(self) -> Iterator[Progress | TaskLost]:
        """What is told since the last call."""
        check_folder(self.folder)
        now = time.monotonic()
        for task, reason, wait in self.engine.lost():  # asked first: what they told is read below
            self._lost.setdefault(task.file_name, (now + wait, reason))
        for entry in list(os.scandir(self.folder)):
            if (task := self._open.get(entry.name)) is None:
                continue
            status = entry.stat()
            state = status.st_ino, status.st_mtime_ns, status.st_size
            if self._read.get(entry.name) == state:
                continue
            self._read[entry.name] = state
            report = TaskReport.read(Path(entry))
            yield self._since(task, report)
            if report.ended:
                del self._open[entry.name]
                Path(entry).unlink()
                if report.storage:
                    raise StorageError(report.error, report.storage)
                if report.error:
                    yield self._failed(task, report.error.strip())
        yield from self._given_again(now)

    def _since(self, task: Task, report: TaskReport) -> Progress:
        """What a report tells beyond earlier ones of the task; a second start finds finished what
        the first one did."""
        total, before = report.units + report.finished, self._counted.get(task.key, 0)
        self._counted[task.key] = max(total, before)
        new = max(0, total - before)
        units = min(new, report.units)
        messages = [message for message in report.messages if message not in self._said]
        self._said.update(messages)
        return Progress(units, report.where, new - units, messages)

    def _given_again(self, now: float) -> Iterator[TaskLost]:
        """Give tasks again whose worker is gone and whose answer has not come."""
        due = {name: reason for name, (at, reason) in self._lost.items() if at <= now}
        if due:  # a worker whose disk is full cannot say so
            check_disk(self.folder)
        again = []
        for name, reason in due.items():
            del self._lost[name]
            if (task := self._open.pop(name, None)) is None:
                continue
            if task.attempt < ATTEMPTS:
                again.append(task.once_more())
            else:
                yield self._failed(task, f"{reason}, {ATTEMPTS} times")
        self.submit(again)

    def _failed(self, task: Task, reason: str) -> TaskLost:
        return TaskLost(self.models[task.model], task.block, reason)


def last_words(log: Path) -> str:
    """The last line that a worker wrote to its log, as ": KeyError: 'x'"; "" if there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    own = [line for line in said if not line.startswith(("srun:", "slurmstepd", "submitit "))]
    return f": {(own or said)[-1]}" if said else ""
