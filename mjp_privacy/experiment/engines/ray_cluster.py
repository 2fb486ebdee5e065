"""Workers of a Ray cluster: each task is a remote function, given a path and three numbers.

    --engine ray                        start Ray on this machine, and stop it at the end
    --engine ray --address auto         the cluster that this machine is part of
    --engine ray --address HOST:PORT    the cluster whose head listens there

The command runs on a machine of the cluster. All machines see the run folder, images and weights by
the same paths, and have this package installed for the same Python; no code is sent. Ray gives
nothing again by itself, so that a lost worker is the same with every engine.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines.options import (
    EngineConfig,
    visible_gpus,
    workers_here,
)
from mjp_privacy.experiment.engines.ray_connection import RayConnection, imported_ray, within
from mjp_privacy.experiment.engines.worker import do_task
from mjp_privacy.experiment.job import Task

LOOK = 5.0  # seconds between two looks at the cluster's machines
PATIENCE = 60.0  # seconds that a cluster may be without a machine that fits
SETTLE = 30.0  # seconds after which a finished task's words are on every file system
STOP = 10.0  # seconds in which tasks that are under way end at the end of a command


@dataclass(frozen=True)
class Demand:
    """What one task needs of a machine, and how large a cluster is that is started for the run."""

    cpus: int
    gpus: float
    own_cpus: int
    own_gpus: int


@dataclass
class RayEngine:
    """RayEngine.of(EngineConfig("ray", workers=4), job.path, threads=1, on_gpu=False)

    workers: tasks under way at a time; None: as many as the living machines have room for
    """

    job_file: Path
    demand: Demand
    workers: int | None = None
    address: str | None = None
    interval: float = 0.1
    _waiting: deque[Task] = field(default_factory=deque, init=False)
    _running: dict[Any, Task] = field(default_factory=dict, init=False)
    _returned: dict[Task, float] = field(default_factory=dict, init=False)
    _cluster: RayConnection | None = field(default=None, init=False)
    _room: int = field(default=0, init=False)
    _looked: float = field(default=0.0, init=False)
    _fitted: float = field(default=0.0, init=False)

    @staticmethod
    def of(config: EngineConfig, job_file: Path, threads: int, on_gpu: bool) -> RayEngine:
        """The engine of these options; the cluster is asked for with the first task."""
        imported_ray()
        if config.gpus_per_task and not on_gpu:
            raise UserError(
                "gpus_per_task: this command computes on the CPU, so its tasks would hold GPUs "
                "and not use them. Leave it out, or give the command on a machine with a GPU."
            )
        gpus = (config.gpus_per_task or 1.0) if on_gpu else 0.0
        own_cpus = threads * workers_here(config, on_gpu)
        demand = Demand(threads, gpus, own_cpus, len(visible_gpus()) if on_gpu else 0)
        return RayEngine(job_file, demand, config.workers, config.address)

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue the tasks; the first ones make the command connect to its cluster."""
        self._waiting.extend(tasks)
        if self._waiting:
            self._start_more()

    def lost(self) -> Sequence[tuple[Task, str]]:
        """Tasks that ended by an error, and those that ended long ago: their words never came."""
        ray = imported_ray()
        lost = []
        for reference in self._over():
            task = self._running.pop(reference)
            try:
                ray.get(reference)
            except Exception as error:  # whatever became of a worker, the run goes on
                lost.append((task, death(error, self.job_file.parent)))
            else:
                self._returned[task] = time.monotonic()
        if self._waiting or self._running:
            self._start_more()
        return lost + self._unheard()

    def _over(self) -> list[Any]:
        """The tasks under way that have ended, as Ray's references."""
        under_way = list(self._running)
        if not under_way:
            return []
        over, _ = imported_ray().wait(under_way, num_returns=len(under_way), timeout=0)
        return list(over)

    def close(self) -> None:
        """Stop what is under way and leave the cluster."""
        if self._cluster is None:
            return
        if self._running and self._cluster.is_there():
            within(STOP, self._cancel)
        self._cluster.close()
        self._cluster = None

    def _cancel(self) -> None:
        ray = imported_ray()
        with contextlib.suppress(Exception):  # the cluster may go meanwhile
            for reference in self._running:
                ray.cancel(reference, force=True)
            ray.wait(list(self._running), num_returns=len(self._running), timeout=STOP)

    def _start_more(self) -> None:
        """Give the cluster as many tasks as it has room for."""
        self._look()
        limit = self.workers if self.workers is not None else self._room
        while self._waiting and len(self._running) < limit:
            task = self._waiting.popleft()
            reference = self._remote().remote(
                str(self.job_file), task.model, task.block, task.attempt
            )
            self._running[reference] = task

    def _remote(self) -> Any:
        """`do_task` as a function of the cluster; its processes and their model are kept."""
        return imported_ray().remote(
            num_cpus=self.demand.cpus, num_gpus=self.demand.gpus, max_retries=0, max_calls=0
        )(do_task)

    def _look(self) -> None:
        """See now and then what machines there are; UserError if there is none for the tasks."""
        now = time.monotonic()
        if self._cluster is None:
            self._cluster = RayConnection.open(
                self.address, self.demand.own_cpus, self.demand.own_gpus
            )
            self._fitted = time.monotonic()
        elif now - self._looked < LOOK:
            return
        self._looked = now
        if not self._cluster.is_there():
            raise UserError(
                f"The Ray cluster at {self._cluster.head} is gone: its head no longer answers. "
                "What was done is kept; start a cluster and give the same command again."
            )
        self._room = self._cluster.room_for(self.demand.cpus, self.demand.gpus)
        if self._room:
            self._fitted = time.monotonic()
        elif time.monotonic() - self._fitted >= PATIENCE:
            gpus = f" and {self.demand.gpus:g} GPU(s)" if self.demand.gpus else ""
            raise UserError(
                f"No machine of the Ray cluster has had {self.demand.cpus} CPU(s){gpus} for "
                f"{PATIENCE:.0f} s, which a task needs. Give smaller --threads or "
                "--gpus-per-task, or add a machine; what was done is kept."
            )

    def _unheard(self) -> list[tuple[Task, str]]:
        """Tasks that ended well a while ago. If what they said was read, naming them is harmless;
        else it is on a disk that this machine does not see."""
        until = time.monotonic() - SETTLE
        late = [task for task, ended in self._returned.items() if ended < until]
        for task in late:
            del self._returned[task]
        reason = (
            f"its worker ended, but what it wrote is not in {self.job_file.parent}: expected a "
            "file system that all machines share"
        )
        return [(task, reason) for task in late]


def death(error: Exception, folder: Path) -> str:
    """What became of a task, in words: what Ray raised when it was asked for its result."""
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, FileNotFoundError):
            return (
                f"its machine does not see {folder}: expected a file system that all machines of "
                "the cluster share"
            )
        if isinstance(cause, ImportError):
            return (
                f"its machine cannot import mjp_privacy ({cause}): expected the same installation "
                "on all machines of the cluster"
            )
        return f"its worker ended with {type(cause).__name__}: {cause}"
    words = {
        exceptions.OutOfMemoryError: "its worker was ended because its machine was out of memory",
        exceptions.NodeDiedError: "its machine died",
        exceptions.WorkerCrashedError: "its worker was killed",
        exceptions.TaskCancelledError: "it was cancelled",
    }
    for kind, text in words.items():
        if isinstance(error, kind):
            return text
    return f"Ray ended it with {type(error).__name__}"
