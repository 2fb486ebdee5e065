"""How time and memory grow with images, patches, width, shuffle ratio, uploads and batch.

    python -m benchmarks.growth [--only images patches] [--repeats 3]

Each point of a curve is one run in a process of its own, with untrained weights and one thread.
Seconds are those of a stage for one image, as the run's rows have them; memory is the process's
peak. The exponent k of value ~ c * size^k is fitted to the logarithms, with its standard error. The
table and the curves go to benchmarks/results/growth.json.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.alternating import machine
from benchmarks.page import write_result
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.lines import STAGE

PATCH = 16
STAGES = ("gradient", "attack", "score")


@dataclass(frozen=True)
class Point:
    """One run: what is attacked, and by what."""

    attack: str
    setting: str = "c"
    side: int = 128
    width: int = 192
    images: int = 8
    gamma: float = 0.27
    batch: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The experiment of the run: one cell, four blocks of transformer, in float32."""
        model = {
            "checkpoint": "random",
            "img_size": self.side,
            "patch_size": PATCH,
            "embed_dim": self.width,
            "depth": 4,
            "num_heads": self.width // 32,
            "num_classes": 100,
            "mean": 0.5,
            "std": 0.5,
            "unknown_embedding": True,
        }
        return {
            "name": "growth",
            "models": {"ViT": model},
            "attacks": [{"name": self.attack, "options": dict(self.options)}],
            "client": {"batch": self.batch},
            "block": 16 if self.batch > 1 else 20,
            "grid": [{"models": ["ViT"], "settings": [self.setting], "gammas": [self.gamma]}],
        }


@dataclass(frozen=True)
class Axis:
    """A quantity that grows while everything else stays, and the runs at its values."""

    name: str
    values: Sequence[float]
    point: Callable[[Any], Point]


def axes() -> list[Axis]:
    """All curves; N = (side / 16)^2 patches stays within the width, as the closed forms need."""
    sides, widths = (64, 96, 128, 160, 192), (96, 128, 192, 256, 384)
    patches = [(side // PATCH) ** 2 for side in sides]
    by_side = dict(zip(patches, sides, strict=True))
    matching = {"steps": 20}
    return [
        Axis("images", (10, 20, 40, 80), lambda n: Point("masked_span", images=n)),
        Axis("patches N", patches, lambda n: Point("april", "a", side=by_side[n])),
        Axis("patches N", patches, lambda n: Point("masked_span", side=by_side[n])),
        Axis("width D", widths, lambda d: Point("april", "a", width=d)),
        Axis("width D", widths, lambda d: Point("masked_span", width=d)),
        Axis("gamma", (0.1, 0.2, 0.4, 0.8), lambda g: Point("masked_span", gamma=g)),
        Axis(
            "gamma",
            (0.1, 0.2, 0.4),
            lambda g: Point("pixel_lattice", gamma=g, side=96, width=128, images=4),
        ),
        Axis(
            "uploads",
            (1, 2, 4, 8),
            lambda r: (
                Point("multi_round", options={"uploads": r}) if r > 1 else Point("masked_span")
            ),
        ),
        Axis(
            "batch B",
            (1, 2, 4, 8),
            lambda b: Point("inverting_gradients", batch=b, side=64, options=matching),
        ),
    ]


# one point, in a process of its own ---------------------------------------------------------------


def run_point(point: Point) -> dict[str, float]:
    """Seconds of each stage for one image, and the process's peak memory in MB."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        photographs = Path(folder) / "photographs"
        _write_photographs(photographs, point.images)
        _run(point, photographs, Path(folder) / "warm", limit=point.batch)  # imports, priors
        rows = _run(point, photographs, Path(folder) / "run")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**{stage: float(rows[STAGE + stage].mean()) for stage in STAGES}, "peak MB": peak}


def _run(point: Point, photographs: Path, out: Path, limit: int | None = None) -> pd.DataFrame:
    from mjp_privacy.experiment.run import run_experiment

    summary = run_experiment(point.config(), images=photographs, out=out, limit=limit, device="cpu")
    assert summary.exit_code == 0, summary
    assert not summary.inapplicable, summary.inapplicable
    store = RunStore(out)
    return store.read(store.stored_cells()[0])


def _write_photographs(folder: Path, count: int) -> None:
    """Crops of scikit-image's photographs, some of them mirrored, so that there are enough."""
    from mjp_privacy.data import embedded_images

    folder.mkdir()
    source = embedded_images()
    for number in range(count):
        picture = source.decode(source.records[number % len(source.records)])
        turn = number // len(source.records)
        (picture if not turn else picture.rotate(90 * turn)).save(folder / f"{number:03d}.png")


# curves -------------------------------------------------------------------------------------------


def exponent(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """k and its standard error in value ~ c * size^k: exponent((1, 2, 4), (3, 6, 12)) is (1, 0)."""
    x, y = np.log(sizes), np.log(np.maximum(values, 1e-9))
    slope, offset = np.polyfit(x, y, 1)
    rest = y - (slope * x + offset)
    freedom = max(len(x) - 2, 1)
    error = math.sqrt(float(rest @ rest) / freedom / float(((x - x.mean()) ** 2).sum()))
    return float(slope), error


def measured(point: Point, repeats: int) -> dict[str, float]:
    """The median over repeats of what a point's processes measured."""
    command = [sys.executable, "-m", "benchmarks.growth", "--point", json.dumps(vars(point))]
    runs = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{point}: {done.stderr}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: float(np.median([run[name] for run in runs])) for name in runs[0]}


def curve(axis: Axis, repeats: int) -> dict[str, Any]:
    """An axis' values, what was measured at them, and the exponents."""
    points = [axis.point(value) for value in axis.values]
    rows = [measured(point, repeats) for point in points]
    fits = {name: exponent(axis.values, [row[name] for row in rows]) for name in rows[0]}
    return {
        "axis": axis.name,
        "attack": f"{points[-1].attack} ({points[-1].setting})",
        "values": list(axis.values),
        "measured": rows,
        "exponents": {name: [round(k, 2), round(error, 2)] for name, (k, error) in fits.items()},
    }


def main() -> None:
    """Measure every curve, print a line for each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="first words of axes, such as images patches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(run_point(Point(**json.loads(arguments.point)))))
        return
    torch.set_num_threads(1)  # as the points have
    facts, curves = machine(), []
    for axis in axes():
        if arguments.only and axis.name.split()[0] not in arguments.only:
            continue
        curves.append(curve(axis, arguments.repeats))
        print(axis.name, curves[-1]["attack"], curves[-1]["exponents"], flush=True)
    if not arguments.only:
        write_result("growth", {"repeats": arguments.repeats, "curves": curves}, facts)


if __name__ == "__main__":
    main()
