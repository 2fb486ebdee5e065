"""How long a command takes to start: each `--help`, and `mjp attack` to its first attacked image.

    python -m benchmarks.start --repeats 5        # writes benchmarks/results/start.json

Every figure is of a fresh process and ends with it: wall time, CPU time and the number of modules
that were imported. One round runs each command once, so that a change of the machine meets all of
them. Files are read from the disk's cache, as from the second start on: one round goes before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.alternating import machine
from benchmarks.page import write_result
from mjp_privacy.cli import COMMANDS

ONE_IMAGE = {  # one model of the package, one cell
    "name": "start",
    "images": "embedded",
    "attacks": [{"name": "april"}],
    "models": {"ViT": {"model": "cifar_vit"}},
    "grid": [{"models": ["ViT"], "settings": ["a"]}],
}
CHILD = """
import json, resource, sys
from mjp_privacy.cli import main
try:
    code = main(sys.argv[2:])
except SystemExit as end:
    code = end.code
used = resource.getrusage(resource.RUSAGE_SELF)
facts = {"cpu": used.ru_utime + used.ru_stime, "modules": len(sys.modules), "code": code}
open(sys.argv[1], "w").write(json.dumps(facts))
"""


@dataclass(frozen=True)
class Start:
    """One start of a command."""

    wall: float
    cpu: float
    modules: int


def started(arguments: Sequence[str], folder: Path) -> Start:
    """Run `mjp` with these arguments in a process of its own."""
    said = folder / "facts.json"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(said), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    wall = time.monotonic() - began
    facts = json.loads(said.read_text())
    if facts["code"]:
        raise RuntimeError(f"mjp {' '.join(arguments)} ended with {facts['code']}: {done.stderr}")
    return Start(wall, facts["cpu"], facts["modules"])


def commands(config: Path, out: Path) -> dict[str, list[str]]:
    """What is started, by name; every start of the attack needs a run folder of its own."""
    helps = {f"mjp {name} --help": [name, "--help"] for name in COMMANDS}
    attack = ["attack", str(config), "--out", str(out), "--limit", "1"]
    return {"mjp --help": ["--help"], **helps, "mjp attack, one image": attack}


def measured(repeats: int) -> dict[str, list[Start]]:
    """Every command's starts, in rounds; the first round is left out."""
    starts: dict[str, list[Start]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        config = place / "start.yaml"
        config.write_text(json.dumps(ONE_IMAGE))  # JSON is YAML
        for number in range(repeats + 1):
            for name, arguments in commands(config, place / f"run{number}").items():
                start = started(arguments, place)
                if number:
                    starts.setdefault(name, []).append(start)
    return starts


def summary(starts: Sequence[Start]) -> dict[str, float]:
    """Median, least and greatest of the times, and the modules."""
    times: dict[str, float] = {"modules": starts[-1].modules}
    for kind in ("wall", "cpu"):
        values = [getattr(start, kind) for start in starts]
        times[f"{kind}_median"] = round(statistics.median(values), 3)
        times[f"{kind}_min"], times[f"{kind}_max"] = round(min(values), 3), round(max(values), 3)
    return times


def main() -> None:
    """Measure, print a table and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    facts = machine()
    figures = {name: summary(starts) for name, starts in measured(arguments.repeats).items()}
    write_result("start", {"repeats": arguments.repeats, "starts": figures}, facts)


if __name__ == "__main__":
    main()
