"""How time and memory grow with images, patches, width, shuffle ratio, uploads and batch.

    python -m benchmarks.growth [--only images patches] [--repeats 3]

Each point of a curve is one run in a process of its own, with untrained weights and one thread.
Seconds are those of a stage for one image, as the run's rows have them; memory is the process's
peak. The exponent k of value ~ c * size^k is fitted to the logarithms, with its standard error. The
table and the curves go to benchmarks/results/growth.json.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from benchmarks.page import Row, machine, rows_of, write_result
from mjp_privacy.data import embedded_images
from mjp_privacy.report.lines import STAGE

PATCH = 16
STAGES = ("gradient", "attack", "score")
Point = Mapping[str, Any]
"""What differs from DEFAULT, in one run."""
DEFAULT: Point = {
    "attack": "masked_span",
    "setting": "c",
    "options": {},
    "gamma": 0.27,
    "side": 128,
    "width": 192,
    "images": 8,
    "batch": 1,
}
SIDES, WIDTHS = (64, 96, 128, 160, 192), (96, 128, 192, 256, 384)
"""N = (side / 16)^2 patches stay within the width, as the closed forms need."""
APRIL: Point = {"attack": "april", "setting": "a"}
LATTICE: Point = {"attack": "pixel_lattice", "side": 96, "width": 128, "images": 4}
MATCHING: Point = {"attack": "inverting_gradients", "side": 64, "options": {"steps": 20}}
ROUNDS: Sequence[Point] = [{}] + [
    {"attack": "multi_round", "options": {"uploads": uploads}} for uploads in (2, 4, 8)
]
CURVES: Sequence[tuple[str, Sequence[float], Sequence[Point]]] = [
    ("images", (10, 20, 40, 80), [{"images": n} for n in (10, 20, 40, 80)]),
    *(
        ("patches N", [(s // PATCH) ** 2 for s in SIDES], [{**what, "side": s} for s in SIDES])
        for what in (APRIL, {})
    ),
    *(("width D", WIDTHS, [{**what, "width": d} for d in WIDTHS]) for what in (APRIL, {})),
    ("gamma", (0.1, 0.2, 0.4, 0.8), [{"gamma": g} for g in (0.1, 0.2, 0.4, 0.8)]),
    ("gamma", (0.1, 0.2, 0.4), [{**LATTICE, "gamma": g} for g in (0.1, 0.2, 0.4)]),
    ("uploads", (1, 2, 4, 8), ROUNDS),
    ("batch B", (1, 2, 4, 8), [{**MATCHING, "batch": b} for b in (1, 2, 4, 8)]),
]
"""What grows, its values, and the runs at them."""


def experiment(point: Point) -> dict[str, Any]:
    """The experiment of a run: one cell, four blocks of transformer, in float32."""
    model = {
        "checkpoint": "random",
        "num_classes": 100,
        "mean": 0.5,
        "std": 0.5,
        "img_size": point["side"],
        "patch_size": PATCH,
        "unknown_embedding": True,
        "embed_dim": point["width"],
        "depth": 4,
        "num_heads": point["width"] // 32,
    }
    return {
        "name": "growth",
        "models": {"ViT": model},
        "attacks": [{"name": point["attack"], "options": point["options"]}],
        "client": {"batch": point["batch"]},
        "block": 16 if point["batch"] > 1 else 20,
        "grid": [{"models": ["ViT"], "settings": [point["setting"]], "gammas": [point["gamma"]]}],
    }


def run_point(point: Point) -> dict[str, float]:
    """Seconds of each stage for one image, and the process's peak memory in MB."""
    torch.set_num_threads(1)
    config, source = experiment(point), embedded_images()
    with tempfile.TemporaryDirectory() as folder:
        photographs = Path(folder) / "photographs"
        photographs.mkdir()
        for number in range(point["images"]):
            turn, which = divmod(number, len(source.records))  # turned, so that there are enough
            picture = source.decode(source.records[which])
            picture.rotate(90 * turn).save(photographs / f"{number:03d}.png")
        warm = Path(folder) / "warm"  # imports, priors
        rows_of(config, warm, images=photographs, limit=point["batch"])
        rows = rows_of(config, Path(folder) / "run", images=photographs)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**{stage: float(rows[STAGE + stage].mean()) for stage in STAGES}, "peak MB": peak}


def measured(point: Point, repeats: int) -> dict[str, float]:
    """The median over repeats of what a point's processes measured."""
    command = [sys.executable, "-m", "benchmarks.growth", "--point", json.dumps(point)]
    runs = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{point}: {done.stderr}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: float(np.median([run[name] for run in runs])) for name in runs[0]}


def exponent(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """k and its standard error in value ~ c * size^k: exponent((1, 2, 4), (3, 6, 12)) is (1, 0)."""
    x, y = np.log(sizes), np.log(np.maximum(values, 1e-9))
    slope, offset = np.polyfit(x, y, 1)
    rest = y - (slope * x + offset)
    freedom = max(len(x) - 2, 1)
    error = math.sqrt(float(rest @ rest) / freedom / float(((x - x.mean()) ** 2).sum()))
    return float(slope), error


def line(curve: Mapping[str, Any]) -> Row:
    """ "12–95, 1.02±0.03": milliseconds of the attack, and the exponent."""
    values, (k, error) = curve["values"], curve["exponents"]["attack"]
    first, last = (1e3 * curve["measured"][end]["attack"] for end in (0, -1))
    grown = f"{first:.3g}–{last:.3g}, {k:.2f}±{error:.2f}"
    return curve["axis"], curve["attack"], f"{values[0]:g}–{values[-1]:g}", grown


def main(only: tuple[str, ...] = (), repeats: int = 3, point: str = "") -> None:
    """Measure every curve, or those with these first words; point: one run, as JSON."""
    if point:
        print(json.dumps(run_point(json.loads(point))))
        return
    torch.set_num_threads(1)  # as the points have
    facts, curves = machine(), []
    for axis, values, changes in CURVES:
        if only and axis.split()[0] not in only:
            continue
        points = [{**DEFAULT, **change} for change in changes]
        rows = [measured(one, repeats) for one in points]
        fits = {name: exponent(values, [row[name] for row in rows]) for name in rows[0]}
        curve = {
            "axis": axis,
            "attack": f"{points[-1]['attack']} ({points[-1]['setting']})",
            "values": list(values),
            "measured": rows,
            "exponents": {
                name: [round(k, 2), round(error, 2)] for name, (k, error) in fits.items()
            },
        }
        curves.append(curve)
        print(*line(curve), flush=True)
    if not only:
        table = [("grows", "attack", "values", "attack, ms"), *map(line, curves)]
        write_result("growth", {"repeats": repeats, "curves": curves}, facts, table)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
