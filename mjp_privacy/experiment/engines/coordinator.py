"""Gives a run's tasks to workers, one at a time each, and watches what they tell.

Nothing but the files of `worker` goes between the two, so an engine needs to start processes and to
know which have ended. What is done of a task shows in the run folder: a task given again finds what
is there. The usual engine, of processes of this machine, stands here too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from mjp_privacy.core.errors import StorageError
from mjp_privacy.core.files import check_disk, check_folder, write_atomically
from mjp_privacy.core.machine import BESIDE, one_thread_environment
from mjp_privacy.core.read import read_json
from mjp_privacy.experiment.engines.options import EngineConfig, visible_gpus, workers_here
from mjp_privacy.experiment.engines.worker import (
    END,
    NEWS,
    Job,
    Task,
    last_words,
    task_file,
    write_typed,
)
from mjp_privacy.experiment.work import News

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
    _workers: dict[int, Task | None] = field(default_factory=dict, init=False)
    """The task that each worker does; None: it was told to end."""
    _free: dict[int, Task] = field(default_factory=dict, init=False)
    """Workers that have done theirs, with the last one."""

    @property
    def folder(self) -> Path:
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
        while self._waiting or any(self._workers.values()):
            news = list(self.news())
            yield from news
            for number in list(self._free):  # then no task is waiting
                del self._free[number]  # a machine of a cluster is not to wait for the last task
                self._workers[number] = None
                self._write(number, END)
            if not news:
                time.sleep(self.engine.interval)

    def news(self) -> Iterator[News]:
        """What is told since the last call."""
        check_folder(self.folder)
        gone = self.engine.gone()  # asked first: what they told before is read below
        for number, task in list(self._workers.items()):
            if task is None or not (path := self.folder / task.file_name).exists():
                continue
            news = read_json(path, NEWS, News)
            del self._workers[number]
            self._free[number] = task
            if news.storage:
                raise StorageError(news.error, news.storage)
            yield replace(news, lost=self._named(task)) if news.error else news
        for number, reason in gone.items():
            self._free.pop(number, None)
            if (task := self._workers.pop(number, None)) is None:
                continue
            check_disk(self.folder)  # a worker whose disk is full cannot say so
            if task.attempt < ATTEMPTS:
                self._waiting.append(task._replace(attempt=task.attempt + 1))
            else:
                yield News(lost=self._named(task), error=f"{reason}, {ATTEMPTS} times")
        self._give_out()

    def _give_out(self) -> None:
        """Give tasks to the workers that are free, and start others as far as tasks are left."""
        for number, last in list(self._free.items()):
            if self._waiting:
                del self._free[number]
                self._give(number, last)
        unused = [number for number in range(self.engine.most) if number not in self._workers]
        started = unused[: len(self._waiting)]  # none, where a worker is still free
        for number in started:
            self._give(number, None)
        if started:
            self.engine.start(started)

    def _give(self, number: int, last: Task | None) -> None:
        """Give a worker the task that is nearest to its last one: of the same block, else of the
        same model, else of a model that nobody has in memory; of several the first."""
        tasks = [*self._workers.values(), *self._free.values()]
        models = {task.model for task in tasks if task is not None}

        def nearness(task: Task) -> tuple[bool, bool, bool]:
            same = last is not None and task.model == last.model
            near = last is not None and task.block == last.block
            return same and near, same, task.model not in models

        task = max(self._waiting, key=nearness)
        self._waiting.remove(task)
        self._write(number, " ".join(map(str, task)))
        self._workers[number] = task

    def _write(self, number: int, text: str) -> None:
        write_atomically(task_file(self.job.path, number), lambda path: path.write_text(text))

    def _named(self, task: Task) -> str:
        return f"{self.models[task.model]}, block {task.block}"


# workers of this machine ------------------------------------------------------------------------


@dataclass
class LocalEngine:
    """LocalEngine(job.path, most=2).start([0, 1])

    gpus: the CUDA devices that workers share, one after the other; none: they use the CPU
    """

    job_file: Path
    most: int
    gpus: Sequence[str] = ()
    interval: float = 0.05
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)
    _unstarted: dict[int, str] = field(default_factory=dict, init=False)

    def start(self, workers: Sequence[int]) -> None:
        """Start a process for each worker; where there is no memory for one, it is gone."""
        program = "from mjp_privacy.experiment.engines import process; process()"
        environment = {**os.environ, **one_thread_environment(), BESIDE: str(self.most)}
        for number in workers:
            if self.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = self.gpus[number % len(self.gpus)]
            try:
                with self._log(number).open("a") as log:
                    self._processes[number] = subprocess.Popen(
                        [sys.executable, "-c", program, str(self.job_file), str(number)],
                        stdin=subprocess.PIPE,  # its end tells the worker that this process is gone
                        stdout=log,  # an attack may print what it likes
                        stderr=log,
                        env=environment,
                        start_new_session=True,  # Ctrl-C reaches this process alone, which ends all
                    )
            except OSError as error:
                self._unstarted[number] = f"worker {number} could not be started: {error}"

    def gone(self) -> Mapping[int, str]:
        """Workers whose process ended, and what those printed last that ended by themselves."""
        gone, self._unstarted = self._unstarted, {}
        for number, process in list(self._processes.items()):
            if (code := process.poll()) is None:
                continue
            del self._processes[number]
            if code >= 0:
                how = f"ended with code {code}{last_words(self._log(number))}"
            else:
                hint = ", as a system does that is out of memory" if code == -9 else ""
                how = f"was killed by signal {-code}{hint}"
            gone[number] = f"worker {number} {how}"
        return gone

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _log(self, number: int) -> Path:
        return self.job_file.parent / f"worker-{number}.log"


def start_engine(config: EngineConfig, job_file: Path, on_gpu: bool) -> Engine:
    """The engine that does the tasks of this job; on_gpu: whether gradients are computed there.
    Packages of another engine are imported where it is asked for."""
    if config.kind == "ray":
        from mjp_privacy.experiment.engines.ray import RayEngine

        return RayEngine(config, job_file, on_gpu)
    if config.kind == "slurm":
        from mjp_privacy.experiment.engines.slurm import SlurmEngine

        return SlurmEngine(config, job_file, on_gpu)
    gpus = visible_gpus() if on_gpu else ()
    return LocalEngine(job_file, workers_here(config, on_gpu), gpus)
