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
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro
from torch import Tensor

from mjp_privacy.core.machine import pick_device
from mjp_privacy.training.config import TrainingConfig, load_training
from mjp_privacy.training.learner import RoundedProducts, has_bfloat16
from mjp_privacy.training.processes import World
from mjp_privacy.training.trainer import Trainer

CONFIGS = Path(__file__).parents[1] / "configs" / "training"
FILES = {"small": "cifar10.yaml", "deit_small": "imagenet.yaml"}
BASELINE, PLAIN, SHUFFLED = "A: baseline", "J: MJP, a step not shuffled", "J: MJP, a shuffled step"
ROWS = {  # name: row of the config, changes of its jigsaw
    BASELINE: ("A", {}),
    PLAIN: ("J", {"first_epoch": 0.0, "share": 0.0}),
    SHUFFLED: ("J", {"first_epoch": 0.0, "share": 1.0}),
    "J: a mask for each image": ("J", {"first_epoch": 0.0, "share": 1.0, "mask_per": "image"}),
}

PRECISIONS = {
    "float32": "float32",
    "bfloat16, rounded products": "bfloat16",
    "bfloat16, torch's own": "bfloat16",
}


@dataclass(frozen=True)
class Arguments:
    size: Literal["small", "deit_small"] = "small"
    batch: int | None = None
    steps: int = 20
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    half: bool = False
    """Compare precisions in place of rows."""


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


def main(arguments: Arguments) -> None:
    half = arguments.half
    device = torch.device("cpu") if half else pick_device(arguments.device)
    base = config_of(SHUFFLED if half else BASELINE, arguments)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    has = "with" if has_bfloat16() else "without"
    about = f"{torch.get_num_threads()} threads, {base.model}, batch {base.recipe.batch}"
    print(f"{where} {has} bfloat16, {about}")
    with tempfile.TemporaryDirectory() as folder:
        trainers = {}
        for name in PRECISIONS if half else ROWS:
            config = base if half else config_of(name, arguments)
            if half:
                recipe = replace(base.recipe, precision=PRECISIONS[name])
                config = replace(base, recipe=recipe)
            trainers[name] = synthetic(config, device, Path(folder))
            if half:
                rounded = "rounded" in name
                trainers[name].learner.products = RoundedProducts() if rounded else nullcontext()
        times = {name: median(found) for name, found in in_turns(trainers, arguments.steps).items()}
        if not half:
            times = {name: each + drawing(trainers[name]) for name, each in times.items()}
            times["J: MJP, half of the steps"] = (times[PLAIN] + times[SHUFFLED]) / 2
    print_steps(times, base.recipe.batch)


def print_steps(times: Mapping[str, float], batch: int) -> None:
    """A line for each row, beside the first."""
    first = next(iter(times.values()))
    print(f"{'row':28} {'ms a step':>10} {'images/s':>9} {'ratio':>6}")
    for name, middle in times.items():
        print(f"{name:28} {1e3 * middle:10.1f} {batch / middle:9.0f} {middle / first:6.3f}")


def config_of(name: str, arguments: Arguments) -> TrainingConfig:
    row, changes = ROWS[name]
    config = load_training(CONFIGS / FILES[arguments.size], row, batch=arguments.batch)
    jigsaw = replace(config.jigsaw, **changes)
    recipe = replace(config.recipe, compile=arguments.compile)
    return replace(config, jigsaw=jigsaw, recipe=recipe)


def synthetic(config: TrainingConfig, device: torch.device, folder: Path) -> Trainer:
    images = config.recipe.batch * 1000
    return Trainer(config, Synthetic(config, device), None, folder, World(device), images)


def in_turns(trainers: dict[str, Trainer], steps: int) -> dict[str, list[float]]:
    """Seconds of every step, all with the masks of one drawing; the first ones are left out."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    device = next(iter(trainers.values())).world.device
    for step in range(steps + 5):
        for name, trainer in trainers.items():
            images, labels = next(trainer.batches.epoch(0, 0, 1))
            synchronize(device)
            started = time.perf_counter()
            trainer.learner.train_step(trainer.step, images.clone(), labels)
            synchronize(device)
            trainer.step = (trainer.step + 1) % trainer.learner.puzzles.together
            if step >= 5:
                times[name].append(time.perf_counter() - started)
    return times


def drawing(trainer: Trainer) -> float:
    """Seconds a shuffled step costs for masks and permutations, which many steps share."""
    if not trainer.learner.puzzles.shuffled(0):
        return 0.0
    found = []
    for chunk in range(1, 6):
        synchronize(trainer.world.device)
        started = time.perf_counter()
        trainer.learner.puzzles._drawn(chunk)
        synchronize(trainer.world.device)
        found.append(time.perf_counter() - started)
    return median(found) / trainer.learner.puzzles.together


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
