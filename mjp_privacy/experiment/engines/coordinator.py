"""Gives a run's tasks to workers, one at a time each, and watches what they tell.

    Engine.start([3])           somebody starts worker 3, anywhere
    RUN/work/worker-3.task      its task, or `end`: written here, read by the worker
    RUN/work/M-B-G.K.json       that the task is over, and how (`worker.TaskReport`)
    Engine.gone()               workers that are no more: their tasks are given again

Nothing else goes between the two, so an engine needs to start processes and to know which have
ended. What is done of a task shows in the run folder: a task given again finds what is there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from mjp_privacy.core.errors import StorageError
from mjp_privacy.core.files import check_disk, check_folder, write_atomically
from mjp_privacy.core.read import read_json
from mjp_privacy.data.decoding import Altered
from mjp_privacy.experiment.engines.worker import (
    END,
    REPORT,
    Job,
    Task,
    TaskReport,
    task_file,
    write_typed,
)
from mjp_privacy.experiment.work import CellDone

ATTEMPTS = 3  # times that a task is given to a worker


class Engine(Protocol):
    """Starts workers somewhere, each of which calls `worker.serve`. Methods return at once."""

    @property
    def most(self) -> int:
        """How many workers there may be at a time."""

    @property
    def interval(self) -> float:
        """Seconds between two looks at what workers tell."""

    def start(self, workers: Sequence[int]) -> None:
        """Start workers of these numbers, whose first tasks are written."""

    def gone(self) -> Mapping[int, str]:
        """The workers that ended since the last call, and how, in words."""

    def close(self) -> None:
        """Stop all workers; tasks that are not done stay undone."""


@dataclass(frozen=True)
class TaskLost:
    """A task that no worker finished, after several tries or because of an error."""

    model: str
    block: int
    reason: str


News = CellDone | TaskLost | Altered


@dataclass
class GivenOut:
    """A worker's task and what is known of it."""

    task: Task  # the last one that it was given
    busy: bool = True
    ending: bool = False  # it was told to end


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
    _waiting: list[Task] = field(default_factory=list, init=False)
    _workers: dict[int, GivenOut] = field(default_factory=dict, init=False)

    @property
    def folder(self) -> Path:
        """Where workers tell what is done."""
        return self.job.path.parent

    def __enter__(self) -> Coordinator:
        shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier command
        self.folder.mkdir(parents=True)
        write_typed(self.job.path, self.job)
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()
        if error[0] is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def submit(self, tasks: Sequence[Task]) -> None:
        """Have these tasks done, together with those that were given before."""
        self._waiting += tasks
        self._give_out()

    def wait(self) -> Iterator[News]:
        """What is told until all tasks are over."""
        while self._waiting or any(worker.busy for worker in self._workers.values()):
            news = list(self.news())
            yield from news
            for number, worker in self._workers.items():
                if not (worker.busy or worker.ending):  # then no task is waiting
                    worker.ending = True  # a machine of a cluster is not to wait for the last task
                    self._write(number, END)
            if not news:
                time.sleep(self.engine.interval)

    def news(self) -> Iterator[News]:
        """What is told since the last call."""
        check_folder(self.folder)
        gone = self.engine.gone()  # asked first: what they told before is read below
        for worker in self._workers.values():
            path = self.folder / worker.task.file_name
            if not worker.busy or not path.exists():
                continue
            report, worker.busy = read_json(path, REPORT, TaskReport), False
            if report.storage:
                raise StorageError(report.error, report.storage)
            yield report.done
            yield report.altered
            if report.error:
                yield self._failed(worker.task, report.error.strip())
        yield from self._lost(gone)
        self._give_out()

    def _lost(self, gone: Mapping[int, str]) -> Iterator[TaskLost]:
        """Queue the tasks again of workers that are gone before they were done."""
        for number, reason in gone.items():
            worker = self._workers.pop(number, None)
            if worker is None or not worker.busy:
                continue
            check_disk(self.folder)  # a worker whose disk is full cannot say so
            attempt = worker.task.attempt
            if attempt < ATTEMPTS:
                self._waiting.append(replace(worker.task, attempt=attempt + 1))
            else:
                yield self._failed(worker.task, f"{reason}, {ATTEMPTS} times")

    def _give_out(self) -> None:
        """Give tasks to the workers that are free, and start others as far as tasks are left."""
        for number, worker in self._workers.items():
            if self._waiting and not (worker.busy or worker.ending):
                self._workers[number] = self._given(number, worker.task)
        free = (n for n in range(self.engine.most) if n not in self._workers)
        started = [number for number, _ in zip(free, list(self._waiting), strict=False)]
        for number in started:
            self._workers[number] = self._given(number, None)
        if started:
            self.engine.start(started)

    def _given(self, number: int, last: Task | None) -> GivenOut:
        """Give a worker the task that is nearest to its last one: of the same block, else of the
        same model, else of a model that nobody has in memory; of several the first."""
        models = {worker.task.model for worker in self._workers.values()}
        model, block = (last.model, last.block) if last else (-1, -1)

        def nearness(task: Task) -> tuple[bool, bool, bool]:
            same = task.model == model
            return same and task.block == block, same, task.model not in models

        task = max(self._waiting, key=nearness)
        self._waiting.remove(task)
        self._write(number, " ".join(map(str, (*task.key, task.attempt))))
        return GivenOut(task)

    def _write(self, number: int, text: str) -> None:
        write_atomically(task_file(self.job.path, number), lambda path: path.write_text(text))

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
