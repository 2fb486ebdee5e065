"""A command in a folder of inputs, with bounds on what it takes; what no bad input may cause."""

from __future__ import annotations

import io
import re
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from mjp_privacy.cli import main

MOST_CPU = 20.0  # seconds
MOST_MEMORY = 4 << 30  # bytes of addresses, beside those that this process has
MOST_FILE = 256 << 20
MOST_LINES = 40
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    code: int
    said: str
    seconds: float = 0.0  # of the processor

    def faults(self, codes: Sequence[int], name: str) -> list[str]:
        """What no bad input may bring about; name: what a refusal holds."""
        said = self.said.replace("\r", "")
        found = {
            "it takes long": self.seconds > MOST_CPU,
            "a traceback": "Traceback (most recent call last)" in said,
            f"exit code {self.code}": self.code not in codes,
            "many lines": bool(self.code) and len(said.splitlines()) > MOST_LINES,
            "control characters": CONTROL.search(said) is not None,
            f"it does not name {name}": bool(self.code) and name not in said,
        }
        return [f"{fault}: {said[-600:]}" for fault, is_so in found.items() if is_so]


def called(argv: Sequence[str], folder: Path) -> Outcome:
    """`mjp ARGV` in this folder."""
    said, began = io.StringIO(), time.process_time()
    with pytest.MonkeyPatch.context() as patch, bounded():
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setenv("COLUMNS", "100")
        patch.delenv("MJP_PRIVACY_DATA", raising=False)
        with redirect_stdout(said), redirect_stderr(said):
            try:
                code = main(list(argv))
            except SystemExit as end:  # of --help, or of a wrong option
                code = int(end.code or 0)
    return Outcome(code, said.getvalue(), time.process_time() - began)


@contextmanager
def bounded() -> Iterator[None]:
    """Let this process take only so much memory meanwhile, and write no larger files; on Linux."""
    taken = Path("/proc/self/statm")
    if not taken.is_file():
        yield
        return
    addresses = int(taken.read_text().split()[0]) * resource.getpagesize()
    bounds = {resource.RLIMIT_AS: addresses + MOST_MEMORY, resource.RLIMIT_FSIZE: MOST_FILE}
    before = {kind: resource.getrlimit(kind) for kind in bounds}
    try:
        for kind, most in bounds.items():
            resource.setrlimit(kind, (most, before[kind][1]))
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)
