"""Hands out a run's tasks to an engine and watches what their workers tell.

    Engine.submit(tasks)      somebody does them, in any order
    RUN/work/M-B-G.K.json     each worker tells here what is done (`job.TaskReport`)
    Engine.lost()             tasks whose worker is gone: they are given again

Nothing else goes between the two, so an engine needs to carry paths and numbers alone. That a task
is done shows in the run folder: a task that is given again finds what is there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mjp_privacy.core.errors import StorageError
from mjp_privacy.core.files import check_disk, check_folder
from mjp_privacy.experiment.job import Job, Task, TaskReport
from mjp_privacy.experiment.work import CellDone

ATTEMPTS = 3  # times that a task is given to a worker


class Engine(Protocol):
    """Does tasks somewhere. Methods return at once."""

    @property
    def interval(self) -> float:
        """Seconds between two looks at what workers tell."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Have these tasks done, together with those that were given before."""

    def lost(self) -> Sequence[tuple[Task, str]]:
        """Tasks that ended without an answer since the last call, and what became of their worker.

        A task may be named that did answer: what it told counts.
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
    """One run's tasks and what was told of them.

    with Coordinator(job, models, engine) as coordinator:
        coordinator.submit(tasks)
        for news in coordinator.wait(): ...
    """

    job: Job
    models: Sequence[str]  # of the plan, in order
    engine: Engine
    _open: dict[tuple[int, int, int], Task] = field(default_factory=dict, init=False)
    _known: dict[tuple[int, int, int], TaskReport] = field(default_factory=dict, init=False)
    _read: dict[Path, tuple[int, int, int]] = field(default_factory=dict, init=False)
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
        self._open |= {task.key: task for task in tasks}
        self.engine.submit(tasks)

    def wait(self) -> Iterator[CellDone | TaskLost]:
        """What is told until all tasks are over."""
        while self._open:
            news = list(self.news())
            yield from news
            if not news:
                time.sleep(self.engine.interval)

    def news(self) -> Iterator[CellDone | TaskLost]:
        """What is told since the last call."""
        check_folder(self.folder)
        lost = self.engine.lost()  # asked first: what they told before is read below
        for task in list(self._open.values()):
            path = self.folder / task.file_name
            report = self._new(path)
            if report is None:
                continue
            yield self._since(task, report)
            if report.ended:
                del self._open[task.key]
                path.unlink()
                if report.storage:
                    raise StorageError(report.error, report.storage)
                if report.error:
                    yield self._failed(task, report.error.strip())
        yield from self._given_again(lost)

    def _new(self, path: Path) -> TaskReport | None:
        """What a file tells, if it changed since it was read last."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        state = status.st_ino, status.st_mtime_ns, status.st_size
        if self._read.get(path) == state:
            return None
        self._read[path] = state
        return TaskReport.read(path)

    def _since(self, task: Task, report: TaskReport) -> CellDone:
        """What a report tells beyond the last one of the task; a second start finds finished what
        the first one did."""
        before = self._known.get(task.key, TaskReport())
        self._known[task.key] = report
        done = max(0, report.units + report.finished - before.units - before.finished)
        units = min(done, max(0, report.units - before.units))
        messages = [m for m in report.messages if m not in before.messages]
        return CellDone(units, report.where, done - units, messages)

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
