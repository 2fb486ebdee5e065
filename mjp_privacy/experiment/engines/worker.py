"""Does tasks of a job, wherever it runs: it knows the job's file and its own number, nothing else.

    serve("RUN/work/job.json", 3)

does one task after the other that stands in RUN/work/worker-3.task. A process keeps the plan, the
model and the block that it had last. What a worker knows of a run, and what it tells of its tasks,
are files that both sides see:

    RUN/work/job.json       the experiment, the images by name, the device
    RUN/work/worker-N.task  the task of worker N, "M B G K", or `end`
    RUN/work/M-B-G.K.json   that the task (model M, block B, group of cells G) is over at its K-th
                            try, and what its worker did of it (`work.News`)
    RUN/work/*.log          what workers printed

The folder is removed when the run ends. Weights and images are read by their paths, so whoever
works must see the same files as the process that planned the run. Rows and pictures never go this
way: they are in the run folder before a task's file tells of them.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from mjp_privacy.core.errors import UserError, storage_error
from mjp_privacy.core.files import watch_folder, working_folders, write_json
from mjp_privacy.core.machine import one_thread, out_of_memory, pick_device
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
        if isinstance(worker.source, Simulated):
            told = replace(told, altered=worker.source.images.altered)
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
