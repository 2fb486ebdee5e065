"""A run's tasks, of which each is a block of images in some cells: workers do them, one at a time
each, and a coordinator gives them out and watches what is told.

    serve("RUN/work/job.json", 3)

is a worker, wherever it runs. Nothing but files goes between it and the coordinator, so an engine
needs to start processes and to know which have ended:

    RUN/work/job.json       the experiment, the images by name, the device
    RUN/work/worker-N.task  the task of worker N, "M B G K", or `end`
    RUN/work/M-B-G.K.json   that the task (model M, block B, group of cells G) is over at its K-th
                            try, and what its worker did of it (`work.News`)
    RUN/work/*.log          what workers printed

Weights and images are read by their paths. Rows are in the run folder before a task's file tells of
them, so that a task given again finds what is there. The engine of this machine stands here too.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from pydantic import TypeAdapter

from mjp_privacy.core.errors import StorageError, UserError, storage_error
from mjp_privacy.core.files import (
    check_disk,
    check_folder,
    watch_folder,
    working_folders,
    write_atomically,
    write_json,
)
from mjp_privacy.core.machine import (
    BESIDE,
    one_thread,
    one_thread_environment,
    out_of_memory,
    pick_device,
)
from mjp_privacy.core.read import FileKind, read_json
from mjp_privacy.core.text import first_of, one_line
from mjp_privacy.data import open_images
from mjp_privacy.experiment.code import Stale, provenance
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.recorded import Recorded
from mjp_privacy.experiment.simulated import Simulated
from mjp_privacy.experiment.source import UploadSource
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import NO_MEMORY, News, Worker
from mjp_privacy.uploads.folder import known_uploads

FOLDER = "work"
END = "end"
"""What stands in a worker's file in place of a task when there is none for it any more."""
JOB = FileKind("what a worker needs to know of a run", "Give the run's command again.", 1 << 32)
NEWS = FileKind("what a worker tells of its task", "Give the run's command again.", 1 << 28)
ATTEMPTS = 3  # times that a task is given to a worker


@dataclass(frozen=True)
class Job:
    """A run as its workers know it: job.source() is the source of its uploads."""

    root: str  # the run folder
    experiment: Experiment
    device: str
    stale: Stale  # whether units that other code finished are done again
    folder: str  # where the command was given; relative paths start there
    made_with: Mapping[str, str | int]
    images: str | None = None  # simulated clients: the path of the images ...
    labels: str | None = None  # ... of their label file ...
    chosen: tuple[str, ...] = ()  # ... and the ids of those that are attacked
    uploads: str | None = None  # recorded clients: the folder of their uploads ...
    limit: int | None = None  # ... the number of images for each line ...
    refused: Mapping[str, str] = field(default_factory=dict)
    """... and the uploads that cannot be attacked, with the reason."""

    @classmethod
    def of(
        cls, experiment: Experiment, root: Path, device: torch.device, stale: Stale, **places: Any
    ) -> Job:
        """The job of a command; places: the fields that say where the images are."""
        here, made_with = str(Path.cwd()), provenance(device)
        return cls(str(root.resolve()), experiment, str(device), stale, here, made_with, **places)

    @property
    def path(self) -> Path:
        return Path(self.root) / FOLDER / "job.json"

    def source(self) -> UploadSource:
        """The source of the run's uploads, opened where the worker stands."""
        device = torch.device(self.device)
        if self.uploads is not None:
            folder = Path(self.uploads)
            known, _ = known_uploads(folder)
            return Recorded(folder, known, device, self.refused, self.limit)
        opened = open_images(str(self.images), self.labels)
        by_name = {record.image_id: record for record in opened.records}
        if lost := [name for name in self.chosen if name not in by_name]:
            raise UserError(
                f"{len(lost)} image(s) of the run are not at {self.images} where the worker looks "
                f"({first_of(lost, 1)}): expected workers to see the same files as the command. "
                "Put them on a shared file system."
            )
        chosen = [by_name[name] for name in self.chosen]
        return Simulated(self.experiment, opened, chosen, device)


class Task(NamedTuple):
    """One block of images of one model, in a group of its cells; the unit that workers are
    given."""

    model: int  # its number among the plan's models
    block: int
    group: int  # of the plan's `groups` of that model
    attempt: int = 1

    @property
    def file_name(self) -> str:
        """The file in which its worker tells what is done."""
        return f"{self.model}-{self.block}-{self.group}.{self.attempt}.json"


def write_typed(path: Path, content: Job | News) -> None:
    write_json(path, TypeAdapter(type(content)).dump_python(content, mode="json"))


def task_file(job_file: Path, worker: int) -> Path:
    return job_file.parent / f"worker-{worker}.task"


# a worker -----------------------------------------------------------------------------------------


def serve(job_file: str, number: int, interval: float = 0.05) -> None:
    """Do the tasks that the worker's file names, until it says `end` or is taken away."""
    if not Path(job_file).is_file():
        raise UserError(
            f"{socket.gethostname()} does not see {job_file}: expected a file system that all "
            "machines share"
        )
    done = ""
    while True:
        try:
            text = task_file(Path(job_file), number).read_text(encoding="ascii")
        except FileNotFoundError:
            return
        if text == END:
            return
        if text == done:
            time.sleep(interval)
            continue
        do_task(job_file, Task(*map(int, text.split())))
        done = text


def do_task(job_file: str, task: Task) -> None:
    """Do one task. What was done, and an error that ended it, is told in the task's file."""
    told = News()
    try:
        worker = _worker(job_file, Path(job_file).stat().st_mtime_ns)
        if task.attempt > 1:  # rows may be there that were not when this process began
            worker.known.clear()
        name = list(worker.plan.blocks)[task.model]
        block, cells = worker.plan.blocks[name][task.block], worker.plan.groups(name)[task.group]
        with one_thread():
            opened = worker.open(name)
            if opened.reason == NO_MEMORY:  # the command itself has opened it
                worker.opened = None
                raise MemoryError(NO_MEMORY)
            for news in worker.work_block(opened, block, cells):
                told = replace(
                    news,
                    units=told.units + news.units,
                    finished=told.finished + news.finished,
                    messages=(*told.messages, *news.messages),
                )
    except Exception as error:
        text, number = traceback.format_exc(), 0
        if isinstance(error, UserError):  # the worker lacks something that the command found
            text = one_line(error, 2000)
        elif storage := storage_error(error, folders=working_folders()):
            text, number = storage.what, storage.errno or 0
        elif out_of_memory(error):
            text = f"memory ran out ({one_line(error) or 'MemoryError'})"
        told = replace(told, error=text, storage=number)
    write_typed(Path(job_file).parent / task.file_name, told)


@lru_cache(maxsize=1)
def _worker(job_file: str, written_at: int) -> Worker:
    """The job's plan, made once a process; later tasks of the same job find it.

    written_at: tells a file from an earlier one of the same name, whose job was another
    """
    job = read_json(Path(job_file), JOB, Job)
    os.chdir(job.folder)
    watch_folder(Path(job.root))
    pick_device(job.device)  # as in the command's process: full precision, or a clear refusal
    store, again = RunStore(Path(job.root)), job.stale == "fresh"
    return Worker(job.experiment, job.source(), store, job.made_with, again)


def last_words(log: Path) -> str:
    """The last line that a worker wrote to its log, as ": KeyError: 'x'"; "" if there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    own = [line for line in said if not line.startswith(("srun:", "slurmstepd", "submitit "))]
    return f": {(own or said)[-1]}" if said else ""


# the coordinator ----------------------------------------------------------------------------------


class Engine(Protocol):
    """Starts workers somewhere, each of which calls `serve`. Methods return at once."""

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
