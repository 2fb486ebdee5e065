"""`mjp attack` as a process of its own, which a test can stop in its middle."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml


@dataclass
class Command:
    """`with Command(words, log) as running: running.wait()`; at its end it is killed."""

    words: Sequence[str]
    log: Path
    environment: Mapping[str, str] | None = None
    folder: Path | None = None

    def __enter__(self) -> Command:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mjp_privacy", *self.words],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=self.environment,
                cwd=self.folder,
                preexec_fn=_hear_interrupts,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, seconds: float = 120) -> int:
        """Its exit code."""
        return self.process.wait(seconds)

    def errors(self) -> str:
        """What it has said so far on the console."""
        return self.log.read_text()


def _hear_interrupts() -> None:
    """Ctrl-C counts for the new process, also where the tests run in a shell's background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def attack_command(
    config: Mapping[str, Any],
    images: Path,
    out: Path,
    options: Sequence[str],
    environment: Mapping[str, str],
) -> Command:
    """`mjp attack` with these options; what it says goes into a file beside `out`."""
    path = out.parent / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    places = ["--images", str(images), "--out", str(out), "--device", "cpu"]
    words = ["attack", str(path), *places, *options]
    return Command(words, out.parent / f"{out.name}.log", environment)
