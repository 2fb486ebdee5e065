"""Commands as processes that are stopped, killed or starved in their middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180.0  # seconds after which a command counts as hanging


@dataclass(frozen=True)
class Ended:
    """How a command ended; code None: it hung and was killed."""

    code: int | None
    errors: str
    seconds: float

    @property
    def is_broken(self) -> bool:
        """Whether it hung, showed a traceback, or met a fault of mjp-privacy."""
        return self.code is None or self.code == 70 or "Traceback" in self.errors


class Running:
    """`with Running(words) as running: running.signal(...); running.ended()`"""

    def __init__(self, words: Sequence[str], limit: Callable[[], None] | None = None) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 -- read after the process has ended
        self.answer = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as the process
        self.began = time.monotonic()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mjp_privacy", *words],
            stdin=subprocess.DEVNULL,
            stdout=self.answer,
            stderr=self.errors,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",  # an answer shows when it is given
            },
            preexec_fn=lambda: _prepare(limit),
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        self.answer.close()

    def has_answered(self) -> bool:
        """Whether it has printed its answer, which it does when all is written."""
        return os.fstat(self.answer.fileno()).st_size > 0

    def work_for(self, seconds: float) -> None:
        """Let it work so long, or to its end."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def wait_until(self, happened: Callable[[], object], seconds: float = PATIENCE) -> bool:
        """Whether it happened before the command ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if happened():
                return True
            time.sleep(0.002)
        return False

    def listens(self) -> bool:
        """Whether it has begun to answer SIGTERM; before, the interpreter starts."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return True
        mask = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(mask >> (signal.SIGTERM - 1) & 1)

    def signal_after(self, seconds: float, number: signal.Signals) -> bool:
        """Send a signal so long after the command listens; False if it has ended by then."""
        if not self.wait_until(self.listens):
            return False
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(number)
            return True
        return False

    def ended(self, patience: float = PATIENCE) -> Ended:
        """Wait for its end; kill it if it hangs."""
        try:
            code: int | None = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        self.errors.seek(0)
        errors = self.errors.read().decode(errors="replace")
        return Ended(code, errors, time.monotonic() - self.began)


def run(words: Sequence[str], limit: Callable[[], None] | None = None) -> Ended:
    """Run a command to its end."""
    with Running(words, limit) as running:
        return running.ended()


def _prepare(limit: Callable[[], None] | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # a shell's background ignores Ctrl-C
    if limit is not None:
        limit()


def descendants(pid: int) -> list[int]:
    """All living processes that this one, or one of its children, has started."""
    parents: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents.setdefault(int(parent), []).append(int(place.name))
    waiting, known = [pid], []
    while waiting:
        children = parents.get(waiting.pop(), [])
        known += children
        waiting += children
    return known
