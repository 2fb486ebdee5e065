"""A run folder of any number of made-up scores, in the layout of a run: for timing `mjp report`.

    python -m benchmarks.large_store /tmp/large --scores 1e8 --report
    python -m benchmarks.large_store /tmp/large --scores 5e5 --side 96 --report      with pictures

Two photographs are attacked in the demo's cells; further images have their scores, a little
altered. Blocks are large, as compaction leaves them; with --side they are those of a run, twenty
images in each, with pictures of that side. --report times `mjp report` of the folder, and its
memory, in a process of its own.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro

from mjp_privacy.experiment.block_file import by_image
from mjp_privacy.experiment.run import run_experiment
from mjp_privacy.experiment.store import RunStore

BLOCK, PIECE = 20, 20_000
"""Images in a block with and without pictures."""


def enlarged(rows: pd.DataFrame, first: int, last: int) -> pd.DataFrame:
    """Rows of these images in one cell, with the scores of the few that were attacked."""
    places, draws = np.arange(first, last), np.random.default_rng([len(rows), first])
    rows = rows.iloc[places % len(rows)].reset_index(drop=True)
    scores = [name for name in rows.select_dtypes(float) if not name.startswith("top1")]
    rows[scores] *= draws.normal(1, 0.1, (len(rows), len(scores)))
    # names as long as those of ImageNet's validation set
    ids = [f"n{at // 50:08d}/ILSVRC2012_val_{at:08d}.JPEG" for at in places]
    digests = [f"{at:064x}" for at in places]
    return rows.assign(image_id=ids, group=ids, sha256=digests, pixel_sha256=digests)


def write_store(store: RunStore, small: RunStore, scores: float, side: int) -> int:
    """Write a folder of about so many scores; how many images it has."""
    cells = [dict(cell) for cell in small.read_cells()]
    each = sum("." in name for cell in cells for name in small.read(cell["run_id"]))
    images, step = round(scores / each), BLOCK if side else PIECE
    for cell in cells:
        run_id = cell["run_id"]
        known = small.read(run_id).drop(columns=["block", "has_picture"], errors="ignore")
        about = small.about(run_id)[-1]
        cell["planned_images"] = images
        for first in range(0, images, step):
            rows, pictures = enlarged(known, first, min(first + step, images)), {}
            if side:
                private = (torch.rand(len(rows), 3, side, side) * 255).round() / 255
                found = torch.rand(private.shape)
                tensors = {"images": found, "target": private, "plain": private}
                pictures = by_image(list(rows["image_id"]), tensors)
            store.write(run_id, first // step, rows, pictures, about | {"cell": cell})
    (store.root / "experiment.yaml").write_text("experiment: {name: large_store}\n")
    store.write_cells(cells)
    return images


def main(
    run: tyro.conf.Positional[Path], scores: float = 1e6, side: int = 0, report: bool = False
) -> None:
    """Write a new folder with about so many scores."""
    if run.exists():
        raise SystemExit(f"{run} exists; give a folder that does not")
    with tempfile.TemporaryDirectory() as small:
        run_experiment("configs/demo.yaml", out=small, device="cpu", limit=2)
        started = time.perf_counter()
        images = write_store(RunStore(run), RunStore(Path(small)), scores, side)
    files = [path for path in run.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{scores:,.0f} scores of {images:,} images: {len(files)} files, {size:.0f} MB, ", end="")
    print(f"{time.perf_counter() - started:.0f} s")
    if not report:
        return
    out, started = run.with_name(f"{run.name}_report"), time.perf_counter()
    command = [sys.executable, "-m", "mjp_privacy", "report", str(run), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    page = (out / "index.html").stat().st_size / 1e6
    spent = time.perf_counter() - started
    print(f"report: {spent:.1f} s, {memory:.2f} GiB at most, page {page:.1f} MB")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
