"""Which trials there are, and how the time is shared among them."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path

from crash import disks, rot, signals
from crash.figures import Figures, table
from crash.results import Results
from crash.trial import Trial
from crash.workplace import Workplace

TRIALS: Mapping[str, Callable[[Trial], Iterator[Figures]]] = {
    "kills": signals.kills,
    "stops": signals.stops,
    "full": disks.full,
    "read-only": disks.read_only,
    "deleted": disks.deleted,
    "rot": rot.rot,
    "cut": rot.cut,
    "gone": rot.gone,
    "workers": signals.workers,
}


WHAT = "Disturb small runs of mjp in every way that a machine does, and compare what they end with."


def main() -> int:
    """Run the trials that the command line names; 1 if anything was wrong."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that disks and folders go
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    chosen = arguments.trials or list(TRIALS)
    lines: list[Figures] = []
    references: dict[str, tuple[Results, float]] = {}
    with tempfile.TemporaryDirectory(prefix="crash-test-", dir=arguments.folder) as folder:
        place = Workplace(Path(folder), arguments.images).prepare()
        for name in chosen:
            until = time.monotonic() + arguments.seconds / len(chosen)
            dice = random.Random(f"{seed} {name}")
            trial = Trial(place, dice, until, arguments.at_least, references)
            for line in TRIALS[name](trial):
                lines.append(line)
                print("  ".join(line.cells), file=sys.stderr, flush=True)
                for complaint in line.complaints:
                    print(f"    WRONG: {complaint}", file=sys.stderr, flush=True)
    print(f"seed {seed}, {date.today()}, {os.cpu_count()} cores\n\n{table(lines)}")
    return 1 if any(line.complaints for line in lines) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/crash-test", description=WHAT)
    parser.add_argument("--seconds", type=float, default=600, help="shared by the trials")
    parser.add_argument("--seed", type=int, help="of all moments and places; else a random one")
    parser.add_argument("--at-least", type=int, default=3, help="disturbances of each command")
    parser.add_argument("--images", type=int, default=12, help="that the run attacks")
    parser.add_argument("--folder", help="where the runs are made; else the temporary folder")
    parser.add_argument("trials", nargs="*", choices=[*TRIALS, []], metavar="TRIAL")
    return parser.parse_args()
