"""What every trial knows: the inputs, the undisturbed results, the dice and the clock."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from crash.figures import Figures
from crash.processes import Ended, run
from crash.results import Results, differences, results
from crash.workplace import Workplace


@dataclass
class Trial:
    """One kind of disturbance, for a share of the time."""

    place: Workplace
    dice: random.Random
    until: float  # on the monotonic clock
    at_least: int = 1  # how often each command is disturbed, however long it takes
    references: dict[str, tuple[Results, float]] = field(default_factory=dict)
    """By command: the undisturbed results, and the seconds that they took."""

    @property
    def has_time(self) -> bool:
        """Whether the trial's time is not over."""
        return time.monotonic() < self.until

    def reference(self, command: str) -> tuple[Results, float]:
        """The undisturbed results of a command and its seconds; made when first asked for."""
        if command not in self.references:
            for needed in NEEDS.get(command, ()):
                self.reference(needed)
            out = self.place.root / "undisturbed" / command
            ended = run(self.place.words(command, out))
            if ended.code != 0:
                raise SystemExit(f"{command}, undisturbed, ended with {ended.code}: {ended.errors}")
            self.references[command] = results(command, out), ended.seconds
        return self.references[command]

    def folder(self, name: str) -> Path:
        """An empty folder for a disturbed command."""
        folder = self.place.root / "disturbed" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def finish(self, command: str, out: Path, line: Figures) -> None:
        """Run the same command to its end and compare everything."""
        ended = run(self.place.words(command, out))
        what = f"{line.trial} of {command}, the same command afterwards"
        if ended.code != 0:
            line.complain(f"{what}: exit {ended.code}: {ended.errors[-400:]}")
            return
        self.compare(command, out, line)

    def compare(self, command: str, out: Path, line: Figures) -> None:
        """Complain about whatever differs from the undisturbed results."""
        if other := differences(self.reference(command)[0], results(command, out)):
            line.complain(f"{line.trial} of {command}: {len(other)} differ, first {other[0]}")


NEEDS = {
    "report": ("attack",),
    "evaluate": ("train",),
    "curves": ("train",),
    "compare": ("federate",),
    "check": ("federate",),
}


def check_broken(ended: Ended, line: Figures, what: str) -> bool:
    """Complain about a hang, a traceback or a fault; whether there was one."""
    if ended.is_broken:
        how = "hung" if ended.code is None else f"exit {ended.code}"
        line.complain(f"{what}: {how}: {ended.errors[-400:]}")
    return ended.is_broken
