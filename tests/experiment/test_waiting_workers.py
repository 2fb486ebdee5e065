"""Workers that wait for tasks end when they shall, however busy the machine is."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

from mjp_privacy.experiment.engines.local import LocalEngine
from mjp_privacy.experiment.job import Task

ENGINES = 30


class Unstarted(LocalEngine):
    """Its workers cannot be started, so that all of its time is waiting."""

    def _started(self, number: int) -> subprocess.Popen[str]:
        raise OSError("none is started")


def test_waiting_workers_end_when_the_engine_is_closed() -> None:
    """Two wait for tasks that come just as their time runs out; where they waited in a
    `SimpleQueue`, one engine in five was never closed."""
    ended = threading.Event()
    for _ in range(2):
        threading.Thread(target=_compute, args=(ended,), daemon=True).start()
    try:
        for _ in range(ENGINES):
            engine = Unstarted(Path("job.json"), workers=2, threads=1, interval=0.005)
            engine.submit([Task(0, block) for block in range(2)])
            for block in range(2, 7):
                engine.submit([Task(0, block)])
                ended.wait(0.9 * engine.interval)
            closing = threading.Thread(target=engine.close, daemon=True)
            closing.start()
            closing.join(20)
            assert not closing.is_alive()
    finally:
        ended.set()


def _compute(ended: threading.Event) -> None:
    while not ended.is_set():
        sum(range(200))
