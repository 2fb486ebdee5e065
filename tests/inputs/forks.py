"""Runs many commands quickly, each in a process of its own with bounds on time and memory.

with ForkServer(scratch) as server:
    for outcome in server.run([Job("list", ["list", "attacks"], folder)]):
        outcome.code
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.inputs.server import STDERR, STDOUT

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0  # wall time of a command, on a busy machine
MOST_CPU = 20  # seconds of the processor's time
MOST_OUTPUT = 1 << 20


@dataclass(frozen=True)
class Job:
    """A command line, and the folder that it is called in."""

    name: str
    argv: list[str]
    folder: Path
    seconds: float = SECONDS
    cpu: int = MOST_CPU
    module: str = "mjp_privacy"


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    job: Job
    code: int  # negative: the number of a signal
    seconds: float
    cpu: float
    memory: int
    hung: bool
    output: str
    errors: str

    @property
    def said(self) -> str:
        """Everything that was printed."""
        return self.output + self.errors


class ForkServer:
    """A server of `jobs` commands at once.

    A superuser's commands see everything but `scratch` read-only: one that takes /dev/null for its
    --out must not replace it. `guarded` says whether that holds.
    """

    def __init__(self, scratch: Path, jobs: int = 2) -> None:
        self.scratch, self.jobs = scratch, jobs
        self.guarded = os.geteuid() != 0 or _can_unshare()

    def __enter__(self) -> ForkServer:
        command = [sys.executable, "-W", "ignore", "-m", "tests.inputs.server", str(self.jobs)]
        if os.geteuid() == 0 and self.guarded:
            command = ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", str(self.scratch), *command]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "Agg",
            "HOME": str(self.scratch),
            "TMPDIR": str(self.scratch),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "100",
        }
        for name in ("MJP_PRIVACY_DATA", "FORCE_COLOR"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        if not self._line().get("ready"):
            raise RuntimeError("the server did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """The outcomes in the order in which the commands end."""
        assert self._process.stdin is not None
        left, sent, number = iter(jobs), dict[int, Job](), 0
        while True:
            while len(sent) < 2 * self.jobs and (job := next(left, None)) is not None:
                line = {"id": number, "argv": job.argv, "folder": str(job.folder)}
                line |= {"seconds": job.seconds, "cpu": job.cpu, "module": job.module}
                text = json.dumps(line) + "\n"
                self._process.stdin.write(text.encode())
                self._process.stdin.flush()
                sent[number] = job
                number += 1
            if not sent:
                return
            answer = self._line()
            job = sent.pop(answer.pop("id"))
            yield Outcome(
                job, **answer, output=_text(job.folder / STDOUT), errors=_text(job.folder / STDERR)
            )

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"the server ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(text)
        return answer


READ_ONLY = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
mount -o remount,bind,ro /dev
mount -o remount,bind,ro /
shift
exec "$@"
"""


def _can_unshare() -> bool:
    command = ["unshare", "-m", "sh", "-c", "mount --make-rprivate /"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MOST_OUTPUT).decode("utf-8", "backslashreplace")
    except OSError:
        return ""
