"""An attack of a test's own that workers know, too, and that can be held.

Workers are processes that import attacks by name. They find this one by `sitecustomize`, a module
that Python imports at its start from PYTHONPATH, so nothing in the package is there for tests.

    trap.hold()       attacks wait from now on
    trap.attacked()   the processes that have begun an attack
    trap.release()
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import pytest

from attacks import ATTACKS
from mjp_privacy.core.registry import Entry
from tests.helpers.runs import one_cell

T = TypeVar("T")

REGISTER = '''"""Adds the attack `trap`; nothing of this is heavy to import."""
from attacks import ATTACKS
from mjp_privacy.core.registry import Entry

ATTACKS.register("trap", Entry("trap_attack:Trap"))
'''
ATTACK = '''"""Grey pictures, once the test lets it go on."""
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from mjp_privacy.interfaces import Reconstruction, Usual

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Trap(Usual):
    name: ClassVar[str] = "trap"

    def needs(self, model):
        return ["patch_embed.proj.weight"]

    def unsupported(self, view):
        return None

    def run(self, view, *, generator):
        labels = view.labels.tolist()
        with (FOLDER / "attacked").open("a") as file:
            print(os.getpid(), file=file)
        print("attacks", labels, flush=True)  # as somebody's attack may
        while (FOLDER / "hold").exists():
            time.sleep(0.02)
        size = view.pixels.size
        return Reconstruction(torch.full((len(labels), 3, size, size), 0.5))
'''


CONFIG = one_cell(attacks=[{"name": "trap"}, {"name": "grey"}], dtypes=["float32", "float64"])
"""Three blocks of three photographs; the trap attacks in two cells of two tasks."""


@dataclass(frozen=True)
class Trap:
    """The folder by which a test and the attack know of each other."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """With which a process knows the attack and computes with one thread."""
        before = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, [str(self.folder), before]))
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def hold(self) -> None:
        """Let attacks wait from now on, and forget what was attacked before."""
        self.reset()
        (self.folder / "hold").touch()

    def release(self) -> None:
        (self.folder / "hold").unlink()

    def reset(self) -> None:
        """Let the attack be harmless, and forget what was attacked."""
        for name in ("hold", "attacked"):
            (self.folder / name).unlink(missing_ok=True)

    def attacked(self) -> list[int]:
        """The process of every block that was attacked, in order."""
        path = self.folder / "attacked"
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@contextmanager
def planted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    """The attack `trap` in this process and in those that it starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(REGISTER)
    (folder / "trap_attack.py").write_text(ATTACK)
    trap = Trap(folder)
    monkeypatch.setenv("PYTHONPATH", trap.environment["PYTHONPATH"])
    monkeypatch.syspath_prepend(folder)
    try:
        with patch.dict(ATTACKS, {"trap": Entry("trap_attack:Trap")}):
            yield trap
    finally:
        sys.modules.pop("trap_attack", None)
        trap.reset()


def until(ask: Callable[[], T | None], seconds: float = 60) -> T:
    """What `ask` answers, once it is not empty; an error after this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := ask():
            return answer
        time.sleep(0.02)
    raise TimeoutError(f"nothing came of {ask} in {seconds:.0f} s")


def is_running(pid: int) -> bool:
    """Whether a process lives and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children_of(pid: int) -> list[int]:
    """The processes that this one has started."""
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]
