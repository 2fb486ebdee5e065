"""How long a run folder takes to be written and read, without any attack.

    python -m benchmarks.store [--blocks 600] [--images 20] [--side 32]
    PYTHONPATH=OLD:. python -m benchmarks.store      by the store of a tree before the wide files

One cell; an image has 24 scores and diagnostics and its pictures. CPU seconds and, in brackets,
seconds by the clock, which include waiting for the disk. Every reader is a new one.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from mjp_privacy.experiment.store import RunStore

NAMES = [(metric, variant) for metric in ("mse", "psnr", "ssim", "fft2d", "lpips") for variant in
         ("standard", "paper")] + [("top1", "intact"), ("top1", "altered")]  # fmt: skip
NAMES += [(f"measure{number}", "diagnostic") for number in range(12)]
IS_OLD = hasattr(RunStore, "write_rows")
RUN_ID = "0123456789abcdef"


def ids_of(block: int, images: int) -> list[str]:
    """Names as long as those of ImageNet's validation set."""
    return [f"n{block:08d}/ILSVRC2012_val_{block * images + at:08d}.JPEG" for at in range(images)]


def write_block(store: Any, block: int, values: np.ndarray, tensors: dict[str, Any]) -> None:
    """One block's rows and pictures."""
    ids = ids_of(block, len(values))
    told = {"status": "ok", "reason": "", "code": "c0ffee", "label_source": "file"}
    if not IS_OLD:
        scores = {f"{m}.{v}": values[:, at] for at, (m, v) in enumerate(NAMES)}
        rows = pd.DataFrame({"image_id": ids, "group": ids, **told, "run_id": RUN_ID, **scores})
        store.write(RUN_ID, block, rows, [(ids, tensors)], {"cell": {"run_id": RUN_ID}})
        return
    from mjp_privacy.experiment.row_columns import CELL_COLUMNS, ROW_COLUMNS

    columns = dict.fromkeys((*ROW_COLUMNS, *CELL_COLUMNS), "same") | told | {"run_id": RUN_ID}
    metrics, variants = zip(*NAMES, strict=True)
    columns |= {"image_id": np.repeat(ids, len(NAMES)), "group": np.repeat(ids, len(NAMES))}
    columns |= {"metric": metrics * len(ids), "variant": variants * len(ids)}
    rows = pd.DataFrame({**columns, "value": values.ravel()})
    store.write_reconstructions(RUN_ID, block, tensors, ids)
    store.write_rows(RUN_ID, block, rows)


def read_all(store: Any) -> int:
    """Every score of every image; how many images there are."""
    if IS_OLD:
        table = store.score_table(RUN_ID)[0]
    else:
        from mjp_privacy.report.rows import cell_scores

        table = cell_scores(store, RUN_ID)
    for metric, variant in NAMES:
        assert np.isfinite(table.column(metric, variant).values).all()
    return len(table.images)


def check(store: Any) -> None:
    """Whether every file is as it was written."""
    if IS_OLD:
        from mjp_privacy.core.sealed import forget_seals
        from mjp_privacy.experiment.damage import find_damage

        forget_seals()
        assert not find_damage(store).faults
    else:
        assert not store.damaged()


def compact(store: Any) -> None:
    """Put the cell's files into few."""
    if IS_OLD:
        from mjp_privacy.experiment.compaction import compact_cell

        compact_cell(store, RUN_ID)
    else:
        store.compact(RUN_ID)


def timed(name: str, work: Callable[[], Any]) -> None:
    """Do it and print how long it took."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{name:28}{cpu:8.3f} s  ({wall:.3f})", flush=True)


def main() -> None:
    """Time the store of whichever tree is imported."""
    parser = argparse.ArgumentParser(prog="benchmarks.store")
    for name, number in (("blocks", 600), ("images", 20), ("side", 32)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    values = random.random((given.images, len(NAMES)))
    plain = random.integers(0, 256, (given.images, 3, given.side, given.side))
    tensors = {"images": torch.rand(plain.shape), "plain": torch.tensor(plain).float() / 255}
    root = Path(tempfile.mkdtemp()) / "run"
    new = lambda: RunStore(root)  # noqa: E731
    last = ids_of(given.blocks - 1, given.images)[-1]
    find = (lambda: new().find_reconstruction(RUN_ID, last)) if IS_OLD else (
        lambda: new().pictures(RUN_ID, last))  # fmt: skip
    blocks = range(given.blocks)
    timed("write", lambda: [write_block(new(), b, values, tensors) for b in blocks])
    print(f"{sum(1 for path in root.rglob('*') if path.is_file())} files")
    timed("read all scores", lambda: read_all(new()))
    timed("one picture", find)
    timed("check every digest", lambda: check(new()))
    timed("compact", lambda: compact(new()))
    timed("read all scores, compacted", lambda: read_all(new()))
    timed("one picture, compacted", find)
    timed("check, compacted", lambda: check(new()))
    shutil.rmtree(root.parent)


if __name__ == "__main__":
    main()
