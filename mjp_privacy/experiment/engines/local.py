"""Workers on this machine: processes that each hold one model and read their tasks by lines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue, SimpleQueue

from mjp_privacy.core.machine import one_thread_environment
from mjp_privacy.experiment.job import Task

ENDED = "ended"
"""What a worker process answers when a task is over."""


@dataclass
class LocalEngine:
    """LocalEngine(job.path, workers=2).submit(tasks)

    gpus: the CUDA devices that workers share, one after the other; none: they use the CPU

    Tasks wait in a Queue, not a SimpleQueue: CPython's `SimpleQueue.get(timeout=…)` can wait for
    ever where another thread takes the item and the time runs out meanwhile (seen in 3.11.7).
    """

    job_file: Path
    workers: int
    gpus: Sequence[str] = ()
    interval: float = 0.05
    _waiting: Queue[Task] = field(default_factory=Queue, init=False)
    _lost: SimpleQueue[tuple[Task, str]] = field(default_factory=SimpleQueue, init=False)
    _processes: dict[int, subprocess.Popen[str]] = field(default_factory=dict, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)
    _closed: threading.Event = field(default_factory=threading.Event, init=False)

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue the tasks; the first call starts as many workers as there is work for."""
        for task in tasks:
            self._waiting.put(task)
        for number in range(len(self._threads), min(self.workers, self._waiting.qsize())):
            thread = threading.Thread(target=self._serve, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def lost(self) -> Sequence[tuple[Task, str]]:
        """Tasks whose worker died."""
        lost = []
        while not self._lost.empty():
            lost.append(self._lost.get())
        return lost

    def close(self) -> None:
        """Kill the workers and wait for them."""
        self._closed.set()
        for process in list(self._processes.values()):
            process.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self, number: int) -> None:
        """Keep one worker busy; if it dies, its task is lost and another one takes its place."""
        while not self._closed.is_set():
            try:
                task = self._waiting.get(timeout=self.interval)
            except Empty:
                continue
            process = self._processes.get(number)
            if process is None or process.poll() is not None:
                try:
                    process = self._processes[number] = self._started(number)
                except OSError as error:  # no memory or no process left
                    self._lost.put((task, f"worker {number} could not be started: {error}"))
                    continue
                if self._closed.is_set():  # `close` may have looked before this one was there
                    process.kill()
            if not self._answered(process, task):
                self._lost.put((task, _death(process.wait(), number, self._log(number))))

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
    last = log.read_text(encoding="utf-8", errors="replace").split("\n")
    words = next((f": {line.strip()}" for line in reversed(last) if line.strip()), "")
    return f"worker {number} ended with code {code}{words}"
