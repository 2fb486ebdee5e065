"""The training loop: epochs, metrics, checkpoints and the export at the end.

A run is a function of its config and its images. Every random choice of a step comes from (seed,
step), so a run that was killed continues from its checkpoint as if it had not stopped: on the same
kind of CPU with the same number of threads its curve is the very same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.curves import draw_curves
from mjp_privacy.training.half_precision import REMARK, rounds_products
from mjp_privacy.training.journal import Journal
from mjp_privacy.training.learner import Learner
from mjp_privacy.training.optimization import learning_rate
from mjp_privacy.training.processes import World
from mjp_privacy.training.restored import resumed
from mjp_privacy.training.running_means import Window
from mjp_privacy.training.snapshots import (
    CHECKPOINT,
    HALF,
    MODEL,
    export_fault,
    export_model,
    load_checkpoint,
    made_with,
    save_checkpoint,
)

CURVE_INTERVAL = 20.0  # seconds between two drawings of curves.png


class Batches(Protocol):
    """Normalised images (b, C, H, W) and labels (b,), or label maps (b, H, W), on the device.

    Only this process's part of each global batch: `file_batches`, `memory_batches` and
    `segmentation.batches` make them.
    """

    def epoch(self, epoch: int, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from `first` up to `steps` of an epoch, in its random order, augmented."""

    def in_order(self, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of all images, once and not augmented, for validation."""


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
        self.made_with: list[dict[str, Any]] = []
        self.steps_per_epoch = images // config.recipe.batch
        self.steps = self.steps_per_epoch * config.recipe.epochs
        self.learner = learner(config, self.steps_per_epoch, world)
        self.journal = Journal(folder, self.steps, quiet=not world.first)
        self.step = 0
        self.score: float | None = None  # the last validation's

    # the loop --------------------------------------------------------------------------------

    def fit(self, beside: Sequence[Path] = ()) -> Path:
        """Train to the end and export; `beside` are folders of runs to draw in the same picture."""
        self._resume()
        if self.step == self.steps and self.world.agreed(self._is_exported()):
            self.journal.say("finished already; nothing to do")
            return self.folder / MODEL
        if rounds_products(self.config, self.world.device):
            self.journal.say(REMARK)
        drawn_at = -math.inf
        while self.step < self.steps:
            self._train_epoch(self.step // self.steps_per_epoch)
            due = self.step < self.steps and time.monotonic() - drawn_at > CURVE_INTERVAL
            if self.world.first and due:
                draw_curves([self.folder, *beside], self.folder)
                drawn_at = time.monotonic()
        path = self._export()
        if self.world.first:
            draw_curves([self.folder, *beside], self.folder)
        return path

    def _train_epoch(self, epoch: int) -> None:
        """Train from the current step to the end of this epoch."""
        self.learner.objective.train()
        first = self.step - epoch * self.steps_per_epoch
        window = Window(self.config.recipe.batch, self.world.device)
        saved_at = time.monotonic()
        for images, labels in window.timed(self.batches.epoch(epoch, first, self.steps_per_epoch)):
            window.add(self._train_step(images, labels))
            self.step += 1
            ended = self.step % self.steps_per_epoch == 0
            if self.step % self.config.log_every and not ended:
                continue
            line = self._measured(window)
            if ended:
                self._end_epoch(line)
                continue
            self._note(line)
            due = time.monotonic() - saved_at > 60 * self.config.checkpoint_minutes
            if self.world.agreed(due):
                self._save()
                saved_at = time.monotonic()
            window.restart()

    def _end_epoch(self, line: dict[str, Any], *, saved: bool = False) -> None:
        """Validate and save. The steps are saved before as well, unless they are: whatever ends a
        validation, the same command goes on with it."""
        if self.validation is not None:
            if not saved:
                self._save(unvalidated=line)
            line = line | self.learner.validated(self.validation)
            self.score = line[self.learner.measure]
        self._note(line)
        self._save()

    def _note(self, line: dict[str, Any]) -> None:
        if self.world.first:
            self.journal.write(line)
            self.journal.show(line)

    def _train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take the step `self.step`; its measurements (5,) stay on the device."""
        return self.learner.train_step(self.step, images, labels)

    def _measured(self, window: Window) -> dict[str, Any]:
        """The line of metrics.jsonl for a window of steps. Stops the run if the loss diverged."""
        loss, entropy, dal, accuracy, norm = self.world.mean(window.mean()).tolist()
        if not math.isfinite(loss + norm):
            raise self._diverged(f"the loss is {loss:g}, its gradient's norm {norm:g}")
        return {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "loss": loss,
            "cross_entropy": entropy,
            "dal": dal,
            "accuracy": accuracy,
            "gradient_norm": norm,
            "lr": learning_rate(self.config, self.step - 1, self.steps_per_epoch),
            "timing": window.timing(),
        }

    def _diverged(self, what: str) -> UserError:
        saved = (self.folder / CHECKPOINT).is_file()
        advice = (
            f"{self.folder.name}/{CHECKPOINT} was saved before that, with finite weights: give it "
            "as --initial to start from them. "
            if saved
            else "No checkpoint had been written yet. "
        )
        return UserError(
            f"At step {self.step} {what}: expected finite numbers. {advice}Start again in another "
            "--out, with a smaller --lr or --precision float32."
        )

    # files -----------------------------------------------------------------------------------

    def _save(self, unvalidated: dict[str, Any] | None = None) -> None:
        """Write the checkpoint; unvalidated: the last step's line, if its validation is to come."""
        if not self.learner.finite():
            raise self._diverged("the weights are no longer finite")
        if self.world.first:
            state = {
                **self.identity,
                "step": self.step,
                **self.learner.state(),
                self.learner.measure: self.score,
                "made_with": self.made_with,
                "unvalidated": unvalidated,
            }
            save_checkpoint(self.folder, state)
        self.world.wait()

    def _resume(self) -> None:
        state = load_checkpoint(self.folder, self.identity)
        unvalidated = None
        if state is not None:
            path = self.folder / CHECKPOINT
            known = resumed(state, path, self.steps, self.learner.measure)
            self.learner.restore(state, path)
            self.step, self.score = known.step, known.score(self.learner.measure)
            self.made_with, unvalidated = state["made_with"], state.get("unvalidated")
            self.journal.say(f"continuing from step {self.step} of {self.steps}")
        now = made_with(self.config, self.world)
        if self.step < self.steps and now not in self.made_with:
            self.made_with = [*self.made_with, now]
        self.world.wait()
        if self.world.first:
            self.journal.keep_until(self.step - (unvalidated is not None))
        if unvalidated is not None:
            self._end_epoch(unvalidated, saved=True)

    def _is_exported(self) -> bool:
        """Whether the files of the finished weights are there as they were written; says which is
        not. Only the first process looks."""
        whole = True
        for name, half in ((MODEL, False), (HALF, True)) if self.world.first else ():
            trained: Any = self.learner.trained
            if fault := export_fault(self.folder / name, trained, half=half):
                whole = False
                self.journal.say(f"{name}: {fault}; it is made again from {CHECKPOINT}")
        return whole

    def _export(self) -> Path:
        facts = {
            self.learner.measure: self.score,
            "steps": self.step,
            "commit": ", ".join(dict.fromkeys(fact["commit"] for fact in self.made_with)),
            "made_with": self.made_with,
            "initial_sha256": self.identity.get("initial"),
        }
        path = self.folder / MODEL
        if self.world.first:
            trained = self.learner.trained
            path = export_model(self.folder, trained, self.config, facts)  # type: ignore[arg-type]
            export_model(
                self.folder,
                trained,  # type: ignore[arg-type]
                self.config,
                facts,
                half=True,
                name=HALF,
            )
        self.world.wait()
        return path
