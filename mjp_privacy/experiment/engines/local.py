"""Workers on this machine, each a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mjp_privacy.core.machine import BESIDE, one_thread_environment
from mjp_privacy.experiment.engines.coordinator import last_words


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
        for number in workers:
            try:
                self._processes[number] = self._started(number)
            except OSError as error:
                self._unstarted[number] = f"worker {number} could not be started: {error}"

    def gone(self) -> Mapping[int, str]:
        """Workers whose process ended."""
        gone, self._unstarted = self._unstarted, {}
        for number, process in list(self._processes.items()):
            if (code := process.poll()) is not None:
                del self._processes[number]
                gone[number] = f"worker {number} {_death(code, self._log(number))}"
        return gone

    def close(self) -> None:
        """Kill the workers and wait for them."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _log(self, number: int) -> Path:
        return self.job_file.parent / f"worker-{number}.log"

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **one_thread_environment(), BESIDE: str(self.most)}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[number % len(self.gpus)]
        program = [sys.executable, "-m", "mjp_privacy.experiment.engines.worker"]
        with self._log(number).open("a") as log:
            return subprocess.Popen(
                [*program, str(self.job_file), str(number)],
                stdin=subprocess.PIPE,  # its end tells the worker that this process is gone
                stdout=log,  # an attack may print what it likes
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends them
            )


def _death(code: int, log: Path) -> str:
    """How a worker ended, in words; what it printed last is told where it ended by itself."""
    if code >= 0:
        return f"ended with code {code}{last_words(log)}"
    hint = ", as a system does that is out of memory" if code == -9 else ""
    return f"was killed by signal {-code}{hint}"
