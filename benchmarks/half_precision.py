"""Training steps in bfloat16 beside float32 on this CPU, in one run, as a ratio.

    python -m benchmarks.half_precision

Row J of the zoo's small model on synthetic images. Rows take turns, step by step; medians are
shown. "torch's own" is bfloat16 as torch computes it here: where the CPU has no instructions for
bfloat16, `mjp train` computes products in float32 and rounds them, which is the row before it.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import tyro

from benchmarks.training import CONFIGS, Synthetic
from mjp_privacy.training.config_files import load_training
from mjp_privacy.training.learner import RoundedProducts, has_bfloat16
from mjp_privacy.training.processes import World
from mjp_privacy.training.trainer import Trainer

CPU = torch.device("cpu")
WHOLE, ROUNDED, OWN = "float32", "bfloat16, rounded products", "bfloat16, torch's own"
PRECISIONS = {WHOLE: "float32", ROUNDED: "bfloat16", OWN: "bfloat16"}


@dataclass(frozen=True)
class Arguments:
    steps: int = 5
    batch: int = 128


def main(arguments: Arguments) -> None:
    """Print a line for each precision."""
    has = "has" if has_bfloat16() else "has no"
    threads = torch.get_num_threads()
    print(f"cpu, which {has} bfloat16, {threads} threads, batch {arguments.batch}")
    with tempfile.TemporaryDirectory() as folder:
        trainers = {name: trainer(name, arguments.batch, Path(folder)) for name in PRECISIONS}
        times: dict[str, list[float]] = {name: [] for name in PRECISIONS}
        for step in range(arguments.steps + 1):
            for name, one in trainers.items():
                started = time.perf_counter()
                one._train_step(*next(one.batches.epoch(0, 0, 1)))
                if step:  # the first one also allocates
                    times[name].append(time.perf_counter() - started)
                one.step += 1
    print(f"{'row':28} {'ms a step':>10} {'ratio':>6}")
    for name, seconds in times.items():
        ratio = median(seconds) / median(times[WHOLE])
        print(f"{name:28} {1e3 * median(seconds):10.0f} {ratio:6.2f}")


def trainer(name: str, batch: int, folder: Path) -> Trainer:
    """A trainer of row J in this precision."""
    config = load_training(CONFIGS / "cifar10.yaml", "J", batch=batch)
    config = replace(config, recipe=replace(config.recipe, precision=PRECISIONS[name]))
    one = Trainer(config, Synthetic(config, CPU), None, folder, World(CPU), batch * 1000)
    one.learner.products = RoundedProducts() if name == ROUNDED else nullcontext()
    return one


if __name__ == "__main__":
    main(tyro.cli(Arguments))
