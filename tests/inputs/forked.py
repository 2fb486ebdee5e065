"""A command in a forked process with bounds on time and memory: nothing is imported again.

The forks are of a process that has done nothing but import: one of the tests' own, after others,
has more memory mapped than the bound.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SAID = ".said"
SECONDS = 60.0
MOST_CPU = 20
MOST_MEMORY = 6 << 30  # address space
MOST_FILE = 256 << 20
MOST_LINES = 40
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b\u202a-\u202e\u2066-\u2069]")


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.inputs.imported"])


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    code: int  # negative: the number of a signal
    said: str
    hung: bool = False

    def faults(self, codes: Sequence[int], names: Sequence[str] = ()) -> list[str]:
        """What no bad input may bring about; names: words that a refusal holds."""
        said = self.said.replace("\r", "")
        found = {
            "it hangs": self.hung,
            "a traceback": "Traceback (most recent call last)" in said,
            f"exit code {self.code}": self.code not in codes,
            "many lines": bool(self.code) and len(said.splitlines()) > MOST_LINES,
            "control characters": CONTROL.search(said) is not None,
            f"names none of {names}": bool(self.code and names)
            and not any(name in said for name in names),
        }
        return [f"{fault}: {said[-600:]}" for fault, is_so in found.items() if is_so]


def forked(argv: Sequence[str], folder: Path) -> Outcome:
    """`mjp ARGV` called in this folder."""
    process = FORKS.Process(target=_child, args=(argv, folder))
    process.start()
    process.join(SECONDS)
    hung = process.is_alive()
    if hung:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    code = process.exitcode
    assert code is not None
    return Outcome(code, _said(folder), hung=hung or code == -signal.SIGXCPU)


def _said(folder: Path) -> str:
    return (folder / SAID).read_bytes()[: 1 << 20].decode("utf-8", "backslashreplace")


def _child(argv: Sequence[str], folder: Path) -> None:
    code = 99
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        place = os.open(folder / SAID, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(place, 1)
        os.dup2(place, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, "utf-8") for number in (1, 2))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE, MOST_FILE))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU, MOST_CPU + 1))
        os.environ.update(HOME=str(folder), MPLBACKEND="Agg", COLUMNS="100", OMP_NUM_THREADS="1")
        os.environ.pop("MJP_PRIVACY_DATA", None)
        os.chdir(folder)
        import torch

        from mjp_privacy.cli import main

        torch.set_num_threads(1)  # OpenMP's threads do not outlive a fork
        code = main(list(argv))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
