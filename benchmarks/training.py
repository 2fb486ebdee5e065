"""Training steps of MJP beside the baseline's, in one run, as a ratio.

    python -m benchmarks.training                                   the small model of the zoo
    python -m benchmarks.training --size deit_small --batch 1024 --device cuda
    python -m benchmarks.training --half --batch 128 --steps 5      bfloat16 beside float32

Steps are whole ones (shuffle, forward, backward, clipping, AdamW) on synthetic images that lie on
the device; what the loader takes of a training stands in its metrics.jsonl (`waiting`). Rows take
turns, step by step; medians are shown. Masks are drawn for many steps at once: that time is taken
by itself and its share of a step is added. The paper shuffles half of the steps: its row is the
mean of a step with and one without.

--half compares row J's step in float32, in bfloat16 as `mjp train` computes it on a CPU without
instructions for it (products in float32, rounded), and in bfloat16 as torch computes it there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro
from torch import Tensor

from mjp_privacy.core.machine import pick_device
from mjp_privacy.training.config import TrainingConfig, load_training
from mjp_privacy.training.processes import RoundedProducts, World, has_bfloat16
from mjp_privacy.training.trainer import Trainer

CONFIGS = Path(__file__).parents[1] / "configs" / "training"
FILES = {"small": "cifar10.yaml", "deit_small": "imagenet.yaml"}
PLAIN, SHUFFLED = "J: MJP, a step not shuffled", "J: MJP, a shuffled step"
ROWS = {  # name: row of the config, changes of its jigsaw
    "A: baseline": ("A", {}),
    PLAIN: ("J", {"first_epoch": 0.0, "share": 0.0}),
    SHUFFLED: ("J", {"first_epoch": 0.0, "share": 1.0}),
    "J: a mask for each image": ("J", {"first_epoch": 0.0, "share": 1.0, "mask_per": "image"}),
}
PRECISIONS = {  # name: precision, products
    "float32": ("float32", nullcontext),
    "bfloat16, rounded products": ("bfloat16", RoundedProducts),
    "bfloat16, torch's own": ("bfloat16", nullcontext),
}
WARM, CHUNKS = 5, 5


class Synthetic:
    """One batch on the device, again and again."""

    def __init__(self, config: TrainingConfig, device: torch.device) -> None:
        size = config.model.img_size
        self.images = torch.randn(config.recipe.batch, 3, size, size, device=device)
        self.labels = torch.arange(config.recipe.batch, device=device) % config.model.num_classes

    def epoch(self, epoch: int, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(first, steps):
            yield self.images, self.labels

    def in_order(self, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.images, self.labels


def main(
    size: Literal["small", "deit_small"] = "small",
    batch: int | None = None,
    steps: int = 20,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    compile: bool = False,
    half: bool = False,
) -> None:
    on = torch.device("cpu") if half else pick_device(device)
    where = torch.cuda.get_device_name() if on.type == "cuda" else "cpu"
    trainers = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PRECISIONS if half else ROWS:
            row, jigsaw = ROWS[SHUFFLED if half else name]
            config = load_training(CONFIGS / FILES[size], row, batch=batch)
            recipe = replace(config.recipe, compile=compile)
            if half:
                recipe = replace(recipe, precision=PRECISIONS[name][0])
            jigsaw = replace(config.jigsaw, **jigsaw)
            config = replace(config, jigsaw=jigsaw, recipe=recipe)
            images, data = config.recipe.batch * 1000, Synthetic(config, on)
            trainers[name] = Trainer(config, data, None, Path(folder), World(on), images)
            if half:
                trainers[name].learner.products = PRECISIONS[name][1]()
        times = {name: median(found) for name, found in in_turns(trainers, steps).items()}
    if not half:
        times = {name: each + drawing(trainers[name]) for name, each in times.items()}
        times["J: MJP, half of the steps"] = (times[PLAIN] + times[SHUFFLED]) / 2
    has = "with" if has_bfloat16() else "without"
    together = config.recipe.batch
    print(f"{where} {has} bfloat16, {torch.get_num_threads()} threads, {config.model}")
    print(f"{'row':28} {'ms a step':>10} {'images/s':>9} {'ratio':>6}   batch {together}")
    first = next(iter(times.values()))
    for name, middle in times.items():
        print(f"{name:28} {1e3 * middle:10.1f} {together / middle:9.0f} {middle / first:6.3f}")


def in_turns(trainers: dict[str, Trainer], steps: int) -> dict[str, list[float]]:
    """Seconds of every step, all with the masks of one drawing; the first ones are left out."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for step in range(steps + WARM):
        for name, trainer in trainers.items():
            images, labels = next(trainer.batches.epoch(0, 0, 1))
            copied = images.clone()
            spent = seconds(
                trainer.world.device, trainer.learner.train_step, trainer.step, copied, labels
            )
            trainer.step = (trainer.step + 1) % trainer.learner.puzzles.together
            if step >= WARM:
                times[name].append(spent)
    return times


def drawing(trainer: Trainer) -> float:
    """Seconds a shuffled step costs for masks and permutations, which many steps share."""
    puzzles, device = trainer.learner.puzzles, trainer.world.device
    if not puzzles.shuffled(0):
        return 0.0
    found = [seconds(device, puzzles._drawn, chunk) for chunk in range(1, 1 + CHUNKS)]
    return median(found) / puzzles.together


def seconds(device: torch.device, work: Callable[..., object], *arguments: object) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
