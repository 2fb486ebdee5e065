"""Does tasks of a job, wherever it runs: it knows the job's file and a task, nothing else.

    python -m mjp_privacy.experiment.engines.worker RUN/work/job.json

reads one task a line from its input ("3 0 2 1": model, block, group, attempt) and answers each with
a line. It ends when its input does. Engines that start functions in place of processes call
`do_task`. A process keeps the plan, the model and the block that it had last.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from queue import Queue

from mjp_privacy.core.device import pick_device
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.held import places
from mjp_privacy.core.lock import watch_folder
from mjp_privacy.core.memory import ran_out
from mjp_privacy.core.storage import at_the_door
from mjp_privacy.core.threads import one_thread
from mjp_privacy.experiment.code import code_of_cells
from mjp_privacy.experiment.engines.coordinator import SHARED
from mjp_privacy.experiment.engines.local import ENDED
from mjp_privacy.experiment.job import Job, Task, TaskReport
from mjp_privacy.experiment.plan import Finished, make_plan
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.experiment.work import Worker


def do_task(job_file: str, model: int, block: int, group: int, attempt: int = 1) -> None:
    """Do one task. What is done, and an error that ended it, is told in the task's file."""
    if not Path(job_file).is_file():
        raise UserError(f"{socket.gethostname()} does not see {job_file}: {SHARED}")
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
            for progress in worker.work_block(worker.open(name), of_block, cells):
                report = replace(
                    report,
                    units=report.units + progress.units,
                    finished=report.finished + progress.finished,
                    where=progress.where,
                    messages=(*report.messages, *progress.messages),
                )
                report.write(path)
    except Exception as error:
        text, number = _ended_by(error)
        report = replace(report, error=text, storage=number)
    replace(report, ended=True).write(path)


def _ended_by(error: Exception) -> tuple[str, int]:
    """What is told of a task that an error ended: one line, unless it is a fault; and the system's
    number where a disk is the cause."""
    if isinstance(error, UserError):  # the worker lacks something that the command found
        return " ".join(str(error).splitlines()), 0
    if storage := at_the_door(error, places()):
        return storage.what, storage.errno or 0
    if ran_out(error):
        return f"memory ran out ({' '.join(str(error).split()) or 'MemoryError'})", 0
    return traceback.format_exc(), 0


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
    """Do the tasks that come in by lines, until the input ends or the parent is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an attack may print what it likes: it goes to the log
    lines: Queue[str] = Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the coordinator is gone or has closed: whatever is half done is done again

    threading.Thread(target=read, daemon=True).start()
    while True:
        do_task(sys.argv[1], *map(int, lines.get().split()))
        print(ENDED, file=answers, flush=True)


if __name__ == "__main__":
    main()
