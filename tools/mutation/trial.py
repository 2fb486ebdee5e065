"""One fault at a time in a copy of the tree: do the tests that run its line fail?

Each trial is a fork of a process that has imported the libraries, but none of the project's files:
a test of the metrics then starts in half a second in place of five.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tools.mutation.covering import Covering
from tools.mutation.mutants import Mutant

FIRST = 10.0
"""Seconds of tests, the quickest ones, that a fault meets first."""

MOST = 150.0
"""Seconds of tests that a fault meets in all."""

MEMORY = 8 << 30

KILLED, TIMED_OUT, SURVIVED, UNCOVERED = "killed", "timed out", "survived", "not covered"


def copied(tree: Path, to: Path) -> None:
    """Copy what git knows of a tree, and new files that it does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=tree, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (tree / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree / name, to / name)


def settle_in(copy: Path, modules: Iterable[str]) -> None:
    """Make this process one whose forks run the tests of the copy."""
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    os.chdir(copy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def undisturbed(tests: Covering) -> bool:
    """Whether all tests pass in a fork without any fault: else nothing could be told from them."""
    return _run(sorted(tests.seconds), 120 + 5 * sum(tests.seconds.values())) == SURVIVED


def outcome(mutant: Mutant, copy: Path, tests: Covering) -> tuple[str, float]:
    """How the tests that run the fault's line ended, and seconds."""
    names = tests.tests_of(mutant.file, mutant.line)
    if not names:
        return UNCOVERED, 0.0
    started = time.monotonic()
    with _planted(mutant, copy / mutant.file):
        for portion in _portions(names, tests.seconds):
            ended = _run(portion, 30 + 5 * sum(tests.seconds[name] for name in portion))
            if ended != SURVIVED:
                break
    return ended, time.monotonic() - started


def _portions(names: Sequence[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """The quickest tests, then all others that there is time for."""
    first: list[str] = []
    later: list[str] = []
    spent = 0.0
    for name in names:
        spent += seconds[name]
        if spent <= FIRST or not first:
            first.append(name)
        elif spent <= MOST:
            later.append(name)
    yield first
    if later:
        yield later


@contextlib.contextmanager
def _planted(mutant: Mutant, path: Path) -> Iterator[None]:
    source = path.read_bytes()
    path.write_bytes(mutant.planted(source))
    try:
        yield
    finally:
        path.write_bytes(source)


def _run(names: Sequence[str], patience: float) -> str:
    """Run these tests in a fork until the first failure."""
    child = os.fork()
    if not child:
        _tests_in_child(names)
    ends = time.monotonic() + patience
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return KILLED if status else SURVIVED
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMED_OUT


def _tests_in_child(names: Sequence[str]) -> None:
    """Never returns: the process ends as the tests do."""
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        import pytest

        arguments = ["-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--durations=0"]
        code = int(pytest.main([*arguments, *names]))
    finally:
        os._exit(code)
