"""The way in to training: finds the images, joins the processes, trains and exports the model."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import lock, output_folder
from mjp_privacy.data.places import keep_apart
from mjp_privacy.models.checkpoint_files import file_sha256, located
from mjp_privacy.training.config import TrainingConfig, plain
from mjp_privacy.training.curves import check_runs
from mjp_privacy.training.examples import Examples, find_examples
from mjp_privacy.training.file_batches import FileBatches
from mjp_privacy.training.learner import Learner, build_mixup
from mjp_privacy.training.memory_batches import MemoryBatches
from mjp_privacy.training.network import check_initial
from mjp_privacy.training.processes import World, joined
from mjp_privacy.training.segmentation.batches import PairBatches
from mjp_privacy.training.segmentation.learner import SegmentationLearner
from mjp_privacy.training.segmentation.pairs import VALIDATION, Pairs, find_pairs
from mjp_privacy.training.snapshots import load_checkpoint
from mjp_privacy.training.trainer import Batches, Trainer

MOST_WORKERS = 256


def train(
    config: TrainingConfig,
    *,
    data: str | Path,
    out: str | Path,
    val: str | Path | None = None,
    device: str = "auto",
    workers: int = 2,
    deterministic: bool = False,
    overlay: str | Path | None = None,
) -> Path:
    """Train a model, or continue the run in `out`; returns the path of the exported model.

    train(load_training("configs/training/cifar10.yaml", "J"), data="train.zip", out="results/J")

    data     class folders, a zip of them, or ImageNet's layout, which holds validation images too;
             for a segmentation pictures and label maps in ADE20K's layout
    overlay  folder of another run, whose curves are drawn into the same picture
    """
    if not 0 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers: expected 0 or more, got {workers} (at most {MOST_WORKERS}).")
    beside = [Path(overlay)] if overlay else []
    segments = config.task == "segmentation"
    find, learner = (find_pairs, SegmentationLearner) if segments else (find_examples, Learner)
    mixed = build_mixup(config) is not None
    with joined(device, config.recipe.batch, pairs=mixed) as world:
        check_runs(beside)
        keep_apart(out, {"--data": data, "--val": val})
        folder = output_folder(Path(out))
        # All processes of a run work in one folder; the first one holds the lock for all.
        with lock(folder) if world.first else nullcontext():
            check_initial(config)
            examples, held_out = find(config, Path(data), Path(val) if val else None)
            identity = _identity(config, examples, held_out)
            if segments and held_out is None and world.first:
                print(f"no images/{VALIDATION}: nothing is scored", file=sys.stderr, flush=True)
            load_checkpoint(folder, identity)  # a folder of another training, before any decoding
            batches = make_batches(config, examples, world, workers)
            validation = (
                make_batches(config, held_out, world, workers, "validation") if held_out else None
            )
            if deterministic:
                _be_deterministic(world)
            number = len(examples)
            run = Trainer(config, batches, validation, folder, world, number, identity, learner)
            return run.fit(beside)


def _identity(
    config: TrainingConfig, examples: Examples | Pairs, held_out: Examples | Pairs | None
) -> dict[str, str]:
    """What decides a run's numbers; a checkpoint is continued only if all of it is the same."""
    initial = Path(config.initial.checkpoint) if config.initial else None
    if config.initial and config.task == "segmentation":  # a classifier's identity is as it was
        initial = located(config.initial.checkpoint)
    return {
        "config": json.dumps(plain(config)),
        "images": examples.digest(),
        "validation": held_out.digest() if held_out else "none",
        "initial": file_sha256(initial) if initial and initial.is_file() else "none",
    }


def make_batches(
    config: TrainingConfig,
    examples: Examples | Pairs,
    world: World,
    workers: int,
    used_for: str = "training",
) -> Batches:
    """Batches of these images, from memory or from files as the config says."""
    if isinstance(examples, Pairs):
        examples.check()
        return PairBatches(config, examples, world, workers)
    if config.data.store == "memory":
        return MemoryBatches(config, examples, world, used_for)
    return FileBatches(config, examples, world, workers)


def _be_deterministic(world: World) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
