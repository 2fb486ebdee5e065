"""Does tasks of a job, wherever it runs: it knows the job's file and its own number, nothing else.

    python -m mjp_privacy.experiment.engines.worker RUN/work/job.json 3

does one task after the other that stands in RUN/work/worker-3.task. An engine that calls functions
calls `serve`. A process keeps the plan, the model and the block that it had last.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from mjp_privacy.core.errors import UserError, storage_error
from mjp_privacy.core.files import watch_folder, working_folders
from mjp_privacy.core.machine import one_thread, out_of_memory, pick_device
from mjp_privacy.experiment.code import code_of_cells
from mjp_privacy.experiment.engines.job import END, Job, Task, TaskReport, task_file
from mjp_privacy.experiment.plan import Finished, make_plan
from mjp_privacy.experiment.simulated import Simulated
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import NO_MEMORY, Worker


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
        do_task(job_file, *map(int, text.split()))
        done = text


def do_task(job_file: str, model: int, block: int, group: int, attempt: int = 1) -> None:
    """Do one task. What is done, and an error that ended it, is told in the task's file."""
    path = Path(job_file).parent / Task(model, block, group, attempt).file_name
    report = TaskReport()
    report.write(path)
    try:
        worker = _worker(job_file, Path(job_file).stat().st_mtime_ns)
        if attempt > 1:  # rows may be there that were not when this process began
            worker.finished = Finished(worker.finished.store, worker.finished.again)
        name = list(worker.plan.blocks)[model]
        of_block, cells = worker.plan.blocks[name][block], worker.plan.groups(name)[group]
        with one_thread():
            opened = worker.open(name)
            if opened.reason == NO_MEMORY:  # the command itself has opened it
                worker.opened = None
                raise MemoryError(NO_MEMORY)
            for progress in worker.work_block(opened, of_block, cells):
                report = replace(
                    report,
                    units=report.units + progress.units,
                    finished=report.finished + progress.finished,
                    where=progress.where,
                    messages=(*report.messages, *progress.messages),
                )
                report.write(path)
    except Exception as error:
        storage = storage_error(error, folders=working_folders())
        if isinstance(error, UserError):  # the worker lacks something that the command found
            text = " ".join(str(error).splitlines())
        elif storage is not None:
            text = storage.what
        elif out_of_memory(error):
            text = f"memory ran out ({' '.join(str(error).split()) or 'MemoryError'})"
        else:
            text = traceback.format_exc()
        report = replace(report, error=text, storage=(storage and storage.errno) or 0)
    else:
        if isinstance(worker.source, Simulated):
            report = replace(report, altered=worker.source.images.altered)
    replace(report, ended=True).write(path)


@lru_cache(maxsize=1)
def _worker(job_file: str, written_at: int) -> Worker:
    """The job's plan, made once a process; later tasks of the same job find it.

    written_at: tells a file from an earlier one of the same name, whose job was another
    """
    job = Job.read(Path(job_file))
    os.chdir(job.folder)
    watch_folder(Path(job.root))
    pick_device(job.device)  # as in the command's process: full precision, or a clear refusal
    source = job.source()
    plan = make_plan(job.experiment, source)
    codes = code_of_cells(plan, with_defenses=job.uploads is None)
    finished = Finished(RunStore(Path(job.root)), job.again)
    return Worker(plan, source, codes, finished, job.made_with)


def main() -> None:
    """Serve until the coordinator says `end` or is gone."""

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)  # whatever is half done is done again

    threading.Thread(target=end_with_parent, daemon=True).start()
    serve(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
