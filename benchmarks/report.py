"""Seconds and memory of `mjp report` on a made-up run: lines × images, reconstructions stored.

    python -m benchmarks.report --lines 18 --images 1000 --side 96

The run is written first, which is not timed. Half of the lines are APRIL's, the others of attacks
that know MJP, so that worst cases, charts, tests and pictures all have something to do.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mjp_privacy.experiment.store import RunStore

ATTACKS = ("april", "masked_span", "pixel_lattice", "multi_round", "mean_image", "april_prior")
METRICS = ("mse", "psnr", "ssim", "fft2d", "lpips")
DIAGNOSTICS = ("grey_psnr", "cond_a", "zero_rows", "gradient_residual", "nonzero_rows", "rank_a")
BLOCK = 20


def cells(lines: int, images: int) -> Iterator[dict[str, object]]:
    """The facts of the cells: six attacks on each of several MJP clients."""
    for number in range(lines):
        attack = ATTACKS[number % len(ATTACKS)]
        yield {
            **{"run_id": f"{number:016d}", "cell_key": str(number), "planned_images": images},
            **{"model": "ViT", "setting": "c", "gamma": 0.27 + number // len(ATTACKS) / 100},
            **{"attack": attack, "attack_name": attack, "dtype": "float32", "seed": 0},
            **{"role": "floor" if attack == "mean_image" else "attack", "status": "ok"},
            **{"uploads": 6 if attack == "multi_round" else 1, "batch": 1},
            **{"victim": "april_block" if attack.startswith("april") else "intact"},
        }


def write_line(store: RunStore, cell: dict[str, object], images: int, side: int) -> None:
    """Rows and reconstructions of one line, in blocks as a run writes them."""
    generator = np.random.default_rng(int(str(cell["run_id"])))
    names = [f"{metric}.{variant}" for metric in METRICS for variant in ("paper", "standard")]
    names += [f"{name}.diagnostic" for name in DIAGNOSTICS]
    known = {"status": "ok", "reason": "", "code": "", "label_source": "", "group": None}
    for block in range(-(-images // BLOCK)):
        ids = [f"image_{i:05d}" for i in range(block * BLOCK, min(images, (block + 1) * BLOCK))]
        values = {name: generator.uniform(5, 60, len(ids)) for name in names}
        rows = pd.DataFrame({"image_id": ids, **known, **values, "run_id": cell["run_id"]})
        pictures = torch.rand(len(ids), 3, side, side)
        private = (pictures * 255).round() / 255
        tensors = {"images": pictures, "target": private, "plain": private, "input": private}
        store.write(str(cell["run_id"]), block, rows, [(ids, tensors)], {"cell": cell})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=18)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--side", type=int, default=96)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore(Path(folder) / "run")
        entries = list(cells(arguments.lines, arguments.images))
        store.write_cells(entries)
        for cell in entries:
            write_line(store, cell, arguments.images, arguments.side)
        out = Path(folder) / "report"
        program = [sys.executable, "-m", "mjp_privacy"]
        command = [*program, "report", str(store.root), "--out", str(out)]
        start = time.perf_counter()
        print("written", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        size = (out / "index.html").stat().st_size / 1e6
    print(
        f"{arguments.lines} lines x {arguments.images} images of {arguments.side} px: "
        f"{seconds:.1f} s, {memory:.2f} GiB at most, page {size:.1f} MB"
    )


if __name__ == "__main__":
    main()
