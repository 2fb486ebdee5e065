"""The training loop: epochs, metrics, checkpoints and the export at the end.

A run is a function of its config and its images. Every random choice of a step comes from (seed,
step), so a run that was killed continues from its checkpoint as if it had not stopped: on the same
kind of CPU with the same number of threads its curve is the very same.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import lock, output_folder
from mjp_privacy.core.machine import commit
from mjp_privacy.core.registry import Entry
from mjp_privacy.data.images import keep_apart
from mjp_privacy.training.batches import Batches
from mjp_privacy.training.config import TrainingConfig, plain
from mjp_privacy.training.learner import Learner, build_mixup, learning_rate
from mjp_privacy.training.processes import REMARK, World, joined
from mjp_privacy.training.run_files import (
    CHECKPOINT,
    MODEL,
    Journal,
    TrainingCheckpoint,
    check_command,
    draw_curves,
    export_model,
    identity_of,
    load_checkpoint,
    save_checkpoint,
)

MOST_WORKERS = 256

# the loop -----------------------------------------------------------------------------------------


class Trainer:
    """One run in its folder: Trainer(...).fit() trains to the end and returns the model's path.

    images    number of training images, all processes together
    identity  what the run's checkpoints belong to; `load_checkpoint` compares it
    learner   what is trained, by its class
    """

    def __init__(
        self,
        config: TrainingConfig,
        batches: Batches,
        validation: Batches | None,
        folder: Path,
        world: World,
        images: int,
        identity: Mapping[str, str] | None = None,
        learner: type[Learner] = Learner,
    ) -> None:
        self.config, self.batches, self.validation = config, batches, validation
        self.folder, self.world = folder, world
        self.identity = dict(identity or {})
        self.made_with: list[dict[str, Any]] = []  # software and machine of every process
        self.steps_per_epoch = images // config.recipe.batch
        self.steps = self.steps_per_epoch * config.recipe.epochs
        self.learner = learner(config, self.steps_per_epoch, world)
        self.journal = Journal(folder, self.steps, quiet=not world.first)
        self.step = 0
        self.score: float | None = None  # the last validation's

    def fit(self) -> Path:
        """Train to the end and export; the path of the model."""
        self._resume()
        if self.step == self.steps:
            self.journal.say("finished already; its model is written again")
        elif self.learner.rounded:
            self.journal.say(REMARK)
        while self.step < self.steps:
            self._train_epoch(self.step // self.steps_per_epoch)
        if self.world.first:
            facts = {
                self.learner.measure: self.score,
                "steps": self.step,
                "commit": ", ".join(dict.fromkeys(fact["commit"] for fact in self.made_with)),
                "made_with": self.made_with,
                "initial_sha256": self.identity.get("initial"),
            }
            export_model(self.folder, self.learner.trained, self.config, facts)
            draw_curves([self.folder], self.folder)
        self.world.wait()
        return self.folder / MODEL

    def _train_epoch(self, epoch: int) -> None:
        self.learner.objective.train()
        first = self.step - epoch * self.steps_per_epoch
        window = list[Tensor]()  # what the steps since the last line measured, still on the device
        began = saved_at = time.monotonic()
        for images, labels in self.batches.epoch(epoch, first, self.steps_per_epoch):
            window.append(self.learner.train_step(self.step, images, labels))
            self.step += 1
            ended = self.step % self.steps_per_epoch == 0
            if self.step % self.config.log_every and not ended:
                continue
            line = self._measured(window, began)
            if ended and self.validation is not None:
                line |= self.learner.validated(self.validation)
                self.score = line[self.learner.measure]
            self.journal.write(line)
            if ended:
                self._save()
                continue
            due = time.monotonic() - saved_at > 60 * self.config.checkpoint_minutes
            if self.world.agreed(due):
                self._save()
                saved_at = time.monotonic()
            window, began = [], time.monotonic()

    def _measured(self, window: Sequence[Tensor], began: float) -> dict[str, Any]:
        """The line of metrics.jsonl for some steps. Stops the run if the loss diverged."""
        names, steps = ("loss", "cross_entropy", "dal", "accuracy", "gradient_norm"), len(window)
        mean = self.world.mean(sum(window, torch.zeros_like(window[0])) / steps)
        numbers = dict(zip(names, mean.tolist(), strict=True))
        elapsed = max(time.monotonic() - began, 1e-9)  # read after the device is done
        loss, norm = numbers["loss"], numbers["gradient_norm"]
        if not math.isfinite(loss + norm):
            raise self._diverged(f"the loss is {loss:g}, its gradient's norm {norm:g}")
        return {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            **numbers,
            "lr": learning_rate(self.config, self.step - 1, self.steps_per_epoch),
            "timing": {
                "images_per_s": round(steps * self.config.recipe.batch / elapsed, 1),
                "seconds_per_step": elapsed / steps,
            },
        }

    def _diverged(self, what: str) -> UserError:
        return UserError(
            f"At step {self.step} {what}: expected finite numbers. Start again in another --out, "
            "with a smaller --lr or --precision float32, and from the weights before that, where "
            f"there are any: --initial {self.folder.name}/{CHECKPOINT}."
        )

    # files -----------------------------------------------------------------------------------

    def _save(self) -> None:
        if not self.learner.finite():
            raise self._diverged("the weights are no longer finite")
        if self.world.first:
            state = {
                **self.identity,
                "step": self.step,
                **self.learner.state(),
                self.learner.measure: self.score,
                "made_with": self.made_with,
                "measured": self.journal.last,
            }
            save_checkpoint(self.folder, state)
        self.world.wait()

    def _resume(self) -> None:
        """Go on where an earlier process stopped, if one did."""
        stored = load_checkpoint(self.folder, self.identity, TrainingCheckpoint, self.steps)
        measured = None
        if stored is not None:
            self.learner.restore(stored, self.folder / CHECKPOINT)
            self.step, self.score = stored.step, getattr(stored, self.learner.measure)
            self.made_with, measured = stored.made_with, stored.measured
            self.journal.say(f"continuing from step {self.step} of {self.steps}")
        now = {  # on a CPU the number of threads changes results, and how it multiplies
            "commit": commit(),
            "torch": str(torch.__version__),
            "device": self.world.device.type,
            "threads": torch.get_num_threads(),
            "processes": self.world.size,
        }
        if self.learner.rounded:
            now["products"] = "float32, rounded to bfloat16"
        if self.step < self.steps and now not in self.made_with:
            self.made_with = [*self.made_with, now]
        self.world.wait()
        self.journal.keep_until(self.step, measured)


# a run --------------------------------------------------------------------------------------------


TASKS: Mapping[str, Entry] = {
    "classification": Entry("mjp_privacy.training.learner:Learner"),
    "segmentation": Entry("mjp_privacy.paper.segmentation:SegmentationLearner"),
}
"""What learns a task, by the name that a config gives it; imported when one trains."""


def train(
    config: TrainingConfig,
    *,
    data: str | Path,
    out: str | Path,
    val: str | Path | None = None,
    device: str = "auto",
    workers: int = 2,
) -> Path:
    """Train a model, or continue the run in `out`; returns the path of the exported model.

    train(load_training("configs/training/cifar10.yaml", "J"), data="train.zip", out="results/J")

    data: class folders, a zip of them, or ImageNet's layout, which holds validation images too; for
    a segmentation pictures and label maps in ADE20K's layout
    """
    if not 0 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers: expected 0 or more, got {workers} (at most {MOST_WORKERS}).")
    learner: type[Learner] = TASKS[config.task].load()
    mixed = build_mixup(config) is not None
    with joined(device, config.recipe.batch, pairs=mixed) as world:
        keep_apart(out, {"--data": data, "--val": val})
        folder = output_folder(Path(out))
        check_command(folder, "train")
        # All processes of a run work in one folder; the first one holds the lock for all.
        with lock(folder) if world.first else nullcontext():
            if config.initial is not None:  # weights that do not fit are refused before any image
                learner.network(config)
            examples, held_out = learner.find(config, Path(data), Path(val) if val else None)
            identity = identity_of(plain(config), examples, held_out, config.initial)
            if config.task == "segmentation" and held_out is None and world.first:
                print("no images/validation: nothing is scored", file=sys.stderr, flush=True)
            steps = config.recipe.epochs * (len(examples) // config.recipe.batch)
            # a folder of another training, before any decoding
            load_checkpoint(folder, identity, TrainingCheckpoint, steps)
            batches = learner.batches(config, examples, world, workers)
            validation = None
            if held_out:
                validation = learner.batches(config, held_out, world, workers, "validation")
            number = len(examples)
            run = Trainer(config, batches, validation, folder, world, number, identity, learner)
            return run.fit()
