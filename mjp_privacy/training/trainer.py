"""The training loop, from top to bottom.

A run is a function of its config and its images: every random choice of a step comes from
(seed, step), so a run that was killed goes on from its checkpoint and, on a CPU with the same
number of threads, draws the very same curve.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.seeding import derive_seed
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.curves import draw_curves
from mjp_privacy.training.journal import Journal
from mjp_privacy.training.network import Objective, build_network
from mjp_privacy.training.optimization import (
    build_optimizer,
    clipped,
    learning_rate,
    set_learning_rate,
)
from mjp_privacy.training.puzzles import Puzzles, apply
from mjp_privacy.training.snapshots import (
    CHECKPOINT,
    MODEL,
    export_model,
    load_checkpoint,
    made_with,
    save_checkpoint,
)
from mjp_privacy.training.window import Window
from mjp_privacy.training.world import World

CURVE_INTERVAL = 20.0  # seconds between two drawings of curves.png


class Batches(Protocol):
    """Normalised images and labels on the device; this process's part of each global batch."""

    def epoch(self, epoch: int, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]: ...

    def in_order(self, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]: ...


class Trainer:
    """One run's state."""

    def __init__(
        self,
        config: TrainingConfig,
        batches: Batches,
        validation: Batches | None,
        folder: Path,
        world: World,
        images: int,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.batches, self.validation = config, batches, validation
        self.folder, self.world = folder, world
        self.identity = dict(identity or {})
        self.made_with: list[dict[str, Any]] = []
        self.steps_per_epoch = images // config.recipe.batch
        self.steps = self.steps_per_epoch * config.recipe.epochs
        self.model = build_network(config).to(world.device)
        self.bfloat16 = config.recipe.precision == "bfloat16"
        if self.bfloat16 and world.device.type == "cpu":
            _plain_attention(self.model)
        self.optimizer = build_optimizer(self.model, config)
        decay = config.recipe.ema_decay
        self.average = ModelEmaV3(self.model, decay=decay) if decay else None
        self.objective: Any = Objective(self.model, config)
        if config.recipe.compile:
            self.objective = torch.compile(self.objective)
        if world.size > 1:
            self.objective = DistributedDataParallel(self.objective)
        self.mix = build_mixup(config)
        self.puzzles = Puzzles(
            config, self.steps_per_epoch, world.device, world.part(config.recipe.batch)
        )
        self.journal = Journal(folder, self.steps, quiet=not world.first)
        self.step = 0
        self.val_top1: float | None = None

    # the loop --------------------------------------------------------------------------------

    def fit(self, beside: Sequence[Path] = ()) -> Path:
        """Train to the end and export; `beside` are runs to draw in the same picture."""
        self._resume()
        finished = self.folder / MODEL
        if self.step == self.steps and finished.is_file():
            self.journal.say("finished already; nothing to do")
            return finished
        drawn = -math.inf
        while self.step < self.steps:
            self._train_epoch(self.step // self.steps_per_epoch)
            old = time.monotonic() - drawn > CURVE_INTERVAL
            if self.world.first and (old or self.step == self.steps):
                draw_curves([self.folder, *beside], self.folder)
                drawn = time.monotonic()
        return self._export()

    def _train_epoch(self, epoch: int) -> None:
        """From the current step to the end of its epoch."""
        self.objective.train()
        first = self.step - epoch * self.steps_per_epoch
        window = Window(self.config.recipe.batch, self.world.device)
        saved = time.monotonic()
        for images, labels in window.timed(self.batches.epoch(epoch, first, self.steps_per_epoch)):
            window.add(self._train_step(images, labels))
            self.step += 1
            ended = self.step % self.steps_per_epoch == 0
            if self.step % self.config.log_every and not ended:
                continue
            line = self._measured(window)
            if ended and self.validation is not None:
                self.val_top1 = line["val_top1"] = self._validate(self.validation)
                self.objective.train()
            if self.world.first:
                self.journal.write(line)
                self.journal.show(line)
            due = time.monotonic() - saved > 60 * self.config.checkpoint_minutes
            if ended or self.world.agreed(due):
                self._save()
                saved = time.monotonic()
            window.restart()

    def _train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One update; (loss, cross-entropy, DAL, accuracy, gradient norm), still on the device."""
        _seed_libraries(derive_seed("step", self.config.seed, self.step, self.world.rank))
        if self.mix is not None:
            images, labels = self.mix(images, labels)
        puzzle = self.puzzles.at(self.step)
        images = apply(puzzle, images, self.config.model.patch_size)
        set_learning_rate(
            self.optimizer, learning_rate(self.config, self.step, self.steps_per_epoch)
        )
        with self._autocast():
            loss, numbers = self.objective(images, labels, puzzle.mask)
        loss.backward()
        norm = clipped(list(self.model.parameters()), self.config.recipe.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.model)
        return torch.cat((numbers, norm.detach().view(1)))

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bfloat16)

    @torch.no_grad()
    def _validate(self, images: Batches) -> float:
        """Top-1 in percent on the validation images, unshuffled."""
        model = self._trained().eval()
        right = torch.zeros(2, device=self.world.device)
        for pixels, labels in images.in_order():
            with self._autocast():
                predicted = model(pixels).argmax(-1)
            right += torch.stack(((predicted == labels).sum(), torch.tensor(len(labels)).to(right)))
        right = self.world.mean(right)
        return round(float(100 * right[0] / right[1]), 4)

    def _measured(self, window: Window) -> dict[str, Any]:
        """The line of a window of steps. Stops at a loss that is no number."""
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
        there = (self.folder / CHECKPOINT).is_file()
        before = (
            f"{self.folder.name}/{CHECKPOINT} is from before, with finite weights: give it as "
            "--initial to go on from them. "
            if there
            else "No checkpoint had been written yet. "
        )
        return UserError(
            f"At step {self.step} {what}: expected numbers. {before}Start again in another --out, "
            "with a smaller --lr or --precision float32."
        )

    # keeping ---------------------------------------------------------------------------------

    def _trained(self) -> nn.Module:
        return self.average.module if self.average is not None else self.model

    def _save(self) -> None:
        sound = torch.stack([p.isfinite().all() for p in self.model.parameters()]).all()
        if not bool(sound):
            raise self._diverged("the weights are no longer finite")
        if self.world.first:
            average = self.average.state_dict() if self.average is not None else None
            state = {
                **self.identity,
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "average": average,
                "val_top1": self.val_top1,
                "made_with": self.made_with,
            }
            save_checkpoint(self.folder, state)
        self.world.wait()

    def _resume(self) -> None:
        state = load_checkpoint(self.folder, self.identity)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.average is not None:
                self.average.load_state_dict(state["average"])
            self.step, self.val_top1 = state["step"], state["val_top1"]
            self.made_with = state["made_with"]
            self.journal.say(f"going on from step {self.step} of {self.steps}")
        now = made_with(self.world)
        if self.step < self.steps and now not in self.made_with:
            self.made_with = [*self.made_with, now]
        self.world.wait()
        if self.world.first:
            self.journal.keep_until(self.step)

    def _export(self) -> Path:
        facts = {
            "val_top1": self.val_top1,
            "steps": self.step,
            "commit": ", ".join(dict.fromkeys(fact["commit"] for fact in self.made_with)),
            "made_with": self.made_with,
            "initial_sha256": self.identity.get("initial"),
        }
        path = self.folder / MODEL
        if self.world.first:
            trained = self._trained()
            path = export_model(self.folder, trained, self.config, facts)  # type: ignore[arg-type]
            export_model(
                self.folder,
                trained,  # type: ignore[arg-type]
                self.config,
                facts,
                half=True,
                name="model_float16.safetensors",
            )
        self.world.wait()
        return path


def build_mixup(config: TrainingConfig) -> Mixup | None:
    augmentation = config.augmentation
    if not augmentation.mixup and not augmentation.cutmix:
        return None
    return Mixup(
        mixup_alpha=augmentation.mixup,
        cutmix_alpha=augmentation.cutmix,
        label_smoothing=config.recipe.label_smoothing,
        num_classes=config.model.num_classes,
    )


def _seed_libraries(seed: int) -> None:
    """timm's mixup and drop path draw from the libraries' own generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def _plain_attention(model: nn.Module) -> None:
    """The CPU's fused attention takes seven times as long in bfloat16 as plain products."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010  (mypy: a Module's attribute)
