"""Does tasks of a job, wherever it runs: it knows the job's file and a task, nothing else.

    python -m mjp_privacy.experiment.engines.worker RUN/work/job.json

reads one task a line from its input ("3 0 1": model, block, attempt) and answers each with a line.
It writes rows and pictures of its block, and what it has done into a file of the task; it ends when
its input does. Engines that start functions in place of processes call `do_task`.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

import torch

from mjp_privacy.core.errors import UserError, storage_error
from mjp_privacy.core.files import watch_folder, working_folders
from mjp_privacy.core.machine import out_of_memory, pick_device
from mjp_privacy.experiment.finished import Finished
from mjp_privacy.experiment.job import Job, Task
from mjp_privacy.experiment.messages import Message, TaskEnded, line_of
from mjp_privacy.experiment.other_code import code_of_cells
from mjp_privacy.experiment.plan import Plan, make_plan
from mjp_privacy.experiment.save import written
from mjp_privacy.experiment.source import UploadSource
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import Codes, OpenModel, work_block

ENDED = "ended"
"""What a worker process answers when a task is over."""


@dataclass
class Workplace:
    """A job as one process has it: its plan, and the model that was opened last."""

    job: Job
    plan: Plan
    source: UploadSource
    codes: Codes
    finished: Finished
    opened: OpenModel | None = field(default=None, init=False)

    def messages(self, task: Task) -> Iterator[Message]:
        """Do the task; what is said is on disk already."""
        name = list(self.plan.blocks)[task.model]
        if self.opened is None or self.opened.name != name:
            self.opened = None  # so that the old model's memory is free before the new one is read
            self.opened = OpenModel.of(self.plan, self.source, name)
            yield self.opened.message()
        store = RunStore(Path(self.job.root))
        finished = self.finished if task.attempt == 1 else Finished(store, again=self.job.again)
        block = self.plan.blocks[name][task.block]
        yield from written(store, work_block(self.plan, self.opened, block, finished, self.codes))


def do_task(job_file: str, model: int, block: int, attempt: int = 1) -> None:
    """Do one task; an error that is a bug ends it, and is told in the task's file."""
    task = Task(model, block, attempt)
    with _new_file(Path(job_file).parent, task) as file:

        def say(message: Message) -> None:
            file.write(line_of(message))
            file.flush()

        try:
            for message in _workplace(job_file).messages(task):
                say(message)
        except Exception as error:
            say(_ended_by(error))
        else:
            say(TaskEnded())


def _ended_by(error: Exception) -> TaskEnded:
    """What is told of a task that an error ended: in one line, unless it is a fault."""
    if isinstance(error, UserError):  # the worker lacks something that the command found
        return TaskEnded(" ".join(str(error).splitlines()))
    if storage := storage_error(error, folders=working_folders()):
        return TaskEnded(storage.what, storage.errno or 0)
    if out_of_memory(error):
        return TaskEnded(f"memory ran out ({' '.join(str(error).split()) or 'MemoryError'})")
    return TaskEnded(traceback.format_exc())


def _new_file(folder: Path, task: Task) -> TextIO:
    """A file that no other start of the task has: whoever reads it never sees it begin again, and
    a process that was taken for dead does not write into it."""
    start = 1
    while True:
        try:
            return (folder / task.file_name(start)).open("x", encoding="utf-8")
        except FileExistsError:
            start += 1


def _workplace(job_file: str) -> Workplace:
    """The job's plan, made once a process; later tasks of the same job find it."""
    return _made_for(job_file, Path(job_file).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _made_for(job_file: str, written_at: int) -> Workplace:
    """written_at: tells a file from an earlier one of the same name, whose job was another."""
    job = Job.read(Path(job_file))
    os.chdir(job.folder)
    torch.set_num_threads(job.threads)
    watch_folder(Path(job.root))
    pick_device(job.device)  # as in the command's process: full precision, or a clear refusal
    source = job.source()
    plan = make_plan(job.experiment, source)
    codes = code_of_cells(plan, with_defenses=job.uploads is None)
    finished = Finished(RunStore(Path(job.root)), again=job.again)
    return Workplace(job, plan, source, codes, finished)


def main() -> None:
    """Do the tasks that come in by lines, until the input ends or the parent is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an attack may print what it likes: it goes to the log
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the coordinator is gone or has closed: whatever is half done is done again

    threading.Thread(target=read, daemon=True).start()
    while True:
        model, block, attempt = map(int, lines.get().split())
        do_task(sys.argv[1], model, block, attempt)
        print(ENDED, file=answers, flush=True)


if __name__ == "__main__":
    main()
