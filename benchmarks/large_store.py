"""A run folder of any number of made-up scores, in the layout of a run: for timing `mjp report`.

    python -m benchmarks.large_store /tmp/large --scores 1e8 --report
    python -m benchmarks.large_store /tmp/large --scores 5e5 --side 96 --report      with pictures

Forty cells are ten checkpoints of a plain and an MJP client with two attacks each; an image in a
cell has 25 scores, as in a real run. Blocks are large, as compaction leaves them; with --side they
are those of a run, twenty images in each, with pictures of that side. --report times `mjp report`
of the folder, and its memory, in a process of its own.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import tyro

from mjp_privacy.experiment.block_file import by_image
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import RunStore

CELLS = 40
BLOCK = 20
PIECE = 20_000  # images in a block without pictures
METRICS = ("mse", "psnr", "ssim", "fft2d", "lpips")
DIAGNOSTICS = (
    *("gradient_residual", "zero_rows", "nonzero_rows", "rank_a", "cond_a"),
    *("ceiling_psnr", "grey_psnr", "oracle_in_place_psnr", "mean_visible_psnr"),
    *("visible_psnr", "shuffled_patches", "moved_patches", "empty_mask"),
)
NAMES = (
    *(f"{metric}.{variant}" for metric in METRICS for variant in ("standard", "paper")),
    *("top1.intact", "top1.altered", *(f"{name}.diagnostic" for name in DIAGNOSTICS)),
)
"""The scores and diagnostics of every image: 25."""
ATTACKS = ("patch_gradient", "patch_prior", "masked_span", "pixel_lattice")


def cell_facts(number: int, images: int) -> Mapping[str, Any]:
    """The facts of one cell: model, setting and attack from its number."""
    model, attack = divmod(number, len(ATTACKS))
    masks = attack >= 2
    entry = {
        **{"run_id": f"{number:016x}", "cell_key": f"{number:016x}", "status": "ok", "reason": ""},
        **{"model": f"ViT-S run {model:02d}", "architecture": "vit_small_patch16_224"},
        **{"checkpoint_sha": f"{model:064x}", "setting": "c" if masks else "a"},
        **{"gamma": 0.27 if masks else 0.0, "attack": ATTACKS[attack], "size": 224, "seed": 0},
        **{"attack_name": ATTACKS[attack], "dtype": "float32", "victim": "intact", "mode": "eval"},
        **{"loss": "cross_entropy", "batch": 1, "dal": False, "planned_images": images},
        **{"position_embedding": "learned", "engine": "batched", "trained_gamma": 0.0},
        **{"data": "made up", "labels": "", "true_labels": True, "first_block": "standard"},
    }
    return CellFacts.read(entry).columns


def image_rows(number: int, first: int, last: int) -> pd.DataFrame:
    """A row for each of these images in one cell, as a run hands it to the store."""
    places, draws = np.arange(first, last), np.random.default_rng([number, first])
    count = len(places)
    psnr, other = draws.normal(18 + number % 7, 4, count), draws.normal(20, 4, count)
    mse = 10 ** (-psnr / 10)
    by_name = {
        **{"mse": mse, "psnr": psnr, "ssim": 1 - mse**0.3, "fft2d": mse / 7, "lpips": mse**0.5},
        **{"top1": (draws.random(count) < 0.8).astype(float), "cond_a": 10 ** (psnr / 5)},
        **{"zero_rows": np.full(count, 53.0 if number % len(ATTACKS) >= 2 else 0.0)},
        **{"grey_psnr": draws.normal(11, 2, count), "ceiling_psnr": psnr + 30},
        **{"gradient_residual": draws.random(count), "empty_mask": np.zeros(count)},
    }
    scores = {
        name: by_name.get(name.partition(".")[0], other) * (1.01 if ".paper" in name else 1)
        for name in NAMES
    }
    # names as long as those of ImageNet's validation set
    ids = [f"n{at // 50:08d}/ILSVRC2012_val_{at:08d}.JPEG" for at in places]
    digests = [f"{at:064x}" for at in places]
    of_image = {
        **{"image_id": ids, "label": pd.array(places % 1000, dtype="Int64"), "group": ids},
        **{"label_source": "synset", "sha256": digests, "pixel_sha256": digests},
        **{"code": "c0de", "status": "ok", "reason": ""},
    }
    seconds = {f"stage_seconds.{stage}": 0.075 for stage in ("gradient", "attack", "score")}
    return pd.DataFrame({**of_image, **scores, **seconds, "run_id": f"{number:016x}"})


def write_store(root: Path, images: int, side: int) -> None:
    """Write the whole folder; side: of the pictures, 0 for none."""
    store, cells = RunStore(root), [cell_facts(number, images) for number in range(CELLS)]
    step = BLOCK if side else PIECE
    for number, facts in enumerate(cells):
        about = {"cell": facts, "code": {"c0de": {}}, "made_with": {"device": "x86_64"}}
        for first in range(0, images, step):
            rows, pictures = image_rows(number, first, min(first + step, images)), {}
            if side:
                private = (torch.rand(len(rows), 3, side, side) * 255).round() / 255
                found = torch.rand(private.shape)
                pictures = by_image(
                    list(rows["image_id"]), {"images": found, "target": private, "plain": private}
                )
            store.write(facts["run_id"], first // step, rows, pictures, about)
    (root / "experiment.yaml").write_text("experiment: {name: large_store}\n")
    store.write_cells(cells)


def main(
    run: tyro.conf.Positional[Path], scores: float = 1e6, side: int = 0, report: bool = False
) -> None:
    """Write a new folder with about so many scores."""
    if run.exists():
        raise SystemExit(f"{run} exists; give a folder that does not")
    started = time.perf_counter()
    images = round(scores / CELLS / len(NAMES))
    write_store(run, images, side)
    files = [path for path in run.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{images * CELLS * len(NAMES):,} scores, {images:,} images in {CELLS} cells: ", end="")
    print(f"{len(files)} files, {size:.0f} MB, {time.perf_counter() - started:.0f} s")
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
