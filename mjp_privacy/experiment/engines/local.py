"""Workers on this machine: processes that each hold one model and read their tasks by lines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mjp_privacy.core.threads import one_thread_environment
from mjp_privacy.experiment.engines.coordinator import Lost, last_words
from mjp_privacy.experiment.job import Task

ENDED = "ended"
"""What a worker process answers when a task is over."""


@dataclass
class LocalEngine:
    """LocalEngine(job.path, workers=2).submit(tasks)

    gpus: the CUDA devices that workers share, one after the other; none: they use the CPU
    """

    job_file: Path
    workers: int
    gpus: Sequence[str] = ()
    interval: float = 0.05
    _waiting: list[Task] = field(default_factory=list, init=False)
    _last: dict[int, tuple[int, int]] = field(default_factory=dict, init=False)
    """The model and the block that each worker has in memory."""
    _lost: list[Lost] = field(default_factory=list, init=False)
    _processes: dict[int, subprocess.Popen[str]] = field(default_factory=dict, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)
    _closed: bool = field(default=False, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    """Held by whoever reads or changes what is above."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue the tasks; as many workers are started as there was work for."""
        with self._changed:
            self._waiting += tasks
            most = min(self.workers, len(self._threads) + len(tasks))
            for number in range(len(self._threads), most):
                thread = threading.Thread(target=self._serve, args=(number,), daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def lost(self) -> Sequence[Lost]:
        """Tasks whose worker died."""
        with self._changed:
            lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Kill the workers and wait for them."""
        with self._changed:
            self._closed = True
            for process in self._processes.values():
                process.kill()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self, number: int) -> None:
        """Keep one worker busy; if it dies, its task is lost and another one takes its place."""
        while (task := self._next(number)) is not None:
            try:
                process = self._process(number)
            except OSError as error:  # no memory or no process left
                reason = f"worker {number} could not be started: {error}"
            else:
                if self._answered(process, task):
                    continue
                reason = _death(process.wait(), number, self._log(number))
            with self._changed:
                self._lost.append(Lost(task, reason))

    def _next(self, number: int) -> Task | None:
        """The worker's next task, once there is one: of the block or else the model that it has in
        memory, or of a model that no other worker has; None: the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            last = self._last.pop(number, (-1, -1))
            taken = {model for model, _ in self._last.values()}

            def nearness(task: Task) -> tuple[bool, bool, bool]:
                here = task.model, task.block
                return here == last, task.model == last[0], task.model not in taken

            task = max(self._waiting, key=nearness)  # of equal ones the first
            self._waiting.remove(task)
            self._last[number] = task.model, task.block
            return task

    def _process(self, number: int) -> subprocess.Popen[str]:
        """The worker's process, started if there is none or it died."""
        with self._changed:
            process = self._processes.get(number)
            if process is None or process.poll() is not None:
                process = self._processes[number] = self._started(number)
                if self._closed:  # `close` looked before this one was there
                    process.kill()
            return process

    def _started(self, number: int) -> subprocess.Popen[str]:
        environment = {**os.environ, **one_thread_environment()}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[number % len(self.gpus)]
        with self._log(number).open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "mjp_privacy.experiment.engines.worker", str(self.job_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the coordinator alone, which ends them
            )

    def _log(self, number: int) -> Path:
        return self.job_file.parent / f"worker-{number}.log"

    def _answered(self, process: subprocess.Popen[str], task: Task) -> bool:
        """Whether the worker did the task; it did not if it died."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(task.model, task.block, task.group, task.attempt, file=process.stdin, flush=True)
        except OSError:
            return False
        return process.stdout.readline().strip() == ENDED


def _death(code: int, number: int, log: Path) -> str:
    """How a worker ended, in words; what it printed last is told where it ended by itself."""
    if code < 0:
        hint = ", as a system does that is out of memory" if code == -9 else ""
        return f"worker {number} was killed by signal {-code}{hint}"
    return f"worker {number} ended with code {code}{last_words(log)}"
