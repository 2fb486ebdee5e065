"""How long a command takes to start: each `--help`, and `mjp attack` to its first attacked image.

    python -m benchmarks.start --repeats 5        # writes benchmarks/results/start.json

Every figure is of a fresh process and ends with it: wall time, CPU time and the number of modules
that were imported. One round runs each command once, so that a change of the machine meets all of
them. Files are read from the disk's cache, as from the second start on: one round goes before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

from benchmarks.page import Row, machine, spread, write_result
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


def started(arguments: Sequence[str], folder: Path) -> dict[str, float]:
    """Run `mjp` with these arguments in a process of its own: seconds, and modules imported."""
    said = folder / "facts.json"
    command = [sys.executable, "-c", CHILD, str(said), *arguments]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall = time.monotonic() - began
    facts: dict[str, float] = json.loads(said.read_text())
    if facts.pop("code"):
        raise RuntimeError(f"mjp {' '.join(arguments)} failed: {done.stderr}")
    return {"wall": wall, **facts}


def measured(repeats: int, folder: Path) -> pd.DataFrame:
    """A row for every start, in rounds; the first round is left out. Every start of the attack
    needs a run folder of its own."""
    config, rows = folder / "start.yaml", []
    config.write_text(json.dumps(ONE_IMAGE))  # JSON is YAML
    commands = {f"mjp {name} --help": [name, "--help"] for name in COMMANDS}
    commands["mjp --help"] = ["--help"]
    for number in range(repeats + 1):
        attack = ["attack", str(config), "--out", str(folder / f"run{number}"), "--limit", "1"]
        for name, arguments in {**commands, "mjp attack, one image": attack}.items():
            rows.append({"name": name, "round": number, **started(arguments, folder)})
    return pd.DataFrame(rows).query("round > 0")


def lines(starts: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The commands' own helps together in the last line."""
    table = [("", "seconds", "modules")]
    for name in ("mjp --help", "mjp attack, one image"):
        one = starts[name]
        table.append((f"`{name}`", f"{one['wall']['median']:.2f}", f"{one['modules']:,}"))
    helped = [starts[f"mjp {name} --help"] for name in COMMANDS]
    walls = sorted(one["wall"]["median"] for one in helped)
    modules = sorted(one["modules"] for one in helped)
    spans = f"{walls[0]:.2f}–{walls[-1]:.2f}", f"{modules[0]:,}–{modules[-1]:,}"
    return [*table, (f"`mjp COMMAND --help`, {len(helped)} commands", *spans)]


def main(repeats: int = 5) -> None:
    facts, figures = machine(), {}
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(repeats, Path(folder))
    for name, starts in rows.groupby("name", sort=False):
        seconds = {clock: spread(starts[clock].tolist()) for clock in ("wall", "cpu")}
        figures[str(name)] = {"modules": int(starts["modules"].iloc[-1]), **seconds}
    write_result("start", {"repeats": repeats, "starts": figures}, facts, lines(figures))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
