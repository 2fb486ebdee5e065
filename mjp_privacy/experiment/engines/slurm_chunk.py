"""What a Slurm task does: some blocks of one model, one after the other."""

from __future__ import annotations

import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mjp_privacy.experiment.engines.worker import do_task

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

TRIES = 3  # starts in a row that end with the time limit before a block is done
WARNING = 240.0  # seconds at a task's end in which it is warned: 90 to 150 before it, less a start


@dataclass
class Chunk:
    """Consecutive blocks of one model: Chunk("RUN/work/job.json", "RUN/work/slurm/x", [(0, 3, 1)],
    60)() does block 3 of the first model.

    submitit carries it to the node in a pickle file, which holds these paths and numbers alone.
    """

    job_file: str
    folder: str  # of the submission; when it is gone, the command that gave the work is over
    tasks: list[tuple[int, int, int]]  # model, block, attempt
    minutes: int  # time limit
    idle: int = 0  # starts in a row that ended with the time limit before a block was done
    _done: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)

    def __call__(self) -> None:
        """Do the blocks. The main thread only waits, so that signals are answered at once."""
        self._began = time.monotonic()
        thread = ThreadPoolExecutor(1)
        try:
            thread.submit(self._work).result()
        except BaseException as error:  # a requeue or an interrupt: the work is not waited for
            if not isinstance(error, SystemExit) or isinstance(error.code, str):
                print(*traceback.format_exception_only(error), sep="", end="", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _work(self) -> None:
        for task in self.tasks:
            if not Path(self.folder).is_dir():
                return
            do_task(self.job_file, *task)
            self._done += 1

    def checkpoint(self) -> DelayedSubmission:
        """What goes on after a preemption or the time limit; called by submitit on a signal."""
        from submitit.helpers import DelayedSubmission

        is_late = time.monotonic() - self._began > 60 * self.minutes - WARNING
        idle = 0 if self._done else self.idle + is_late
        if idle >= TRIES:
            sys.exit(
                f"no block was done within {self.minutes} minutes, {TRIES} times in a row: "
                "give more (option minutes)"
            )
        left = self.tasks[self._done :]
        return DelayedSubmission(Chunk(self.job_file, self.folder, left, self.minutes, idle))
