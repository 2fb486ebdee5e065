"""What learns in a run: the network with its optimiser, one step of training, and its accuracy.

`trainer` repeats the steps; everything that the next step depends on is in `Learner.state`, the
number of the step and the config.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mjp_privacy.core.machine import derive_seed
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.half_precision import products, rounds_products
from mjp_privacy.training.network import Objective, build_network
from mjp_privacy.training.optimization import (
    build_optimizer,
    clipped,
    dal_weight,
    learning_rate,
    set_learning_rate,
)
from mjp_privacy.training.processes import World
from mjp_privacy.training.puzzles import Puzzles, apply
from mjp_privacy.training.restored import check_optimizer, check_weights
from mjp_privacy.training.snapshots import STATE


class Validation(Protocol):
    """Images to validate on; `trainer.Batches` has more."""

    def in_order(self, batch: int = 256) -> Iterable[tuple[Tensor, Tensor]]:
        """This process's share of all images with their labels, once and not augmented."""


class Learner:
    """The network, its optimiser, the average of its weights if there is one, and its loss."""

    measure = "val_top1"
    """What `validated` gives that a checkpoint and the finished model keep."""

    def __init__(self, config: TrainingConfig, steps_per_epoch: int, world: World) -> None:
        self.config, self.steps_per_epoch, self.world = config, steps_per_epoch, world
        self.model = self._network().to(world.device)
        self.bfloat16 = config.recipe.precision == "bfloat16"
        self.products = products(config, world.device)
        if self.bfloat16 and world.device.type == "cpu":
            _plain_attention(self.model)
        self.optimizer = build_optimizer(self.model, config)
        decay = config.recipe.ema_decay
        self.average = ModelEmaV3(self.model, decay=decay) if decay else None
        self.objective: Any = self._objective()
        if config.recipe.compile and not rounds_products(config, world.device):
            self.objective = torch.compile(self.objective)
        if world.size > 1:
            self.objective = DistributedDataParallel(self.objective)
        self.mix = build_mixup(config)
        self.puzzles = Puzzles(
            config, steps_per_epoch, world.device, world.part(config.recipe.batch)
        )

    def _network(self) -> Any:
        """The network with its initial weights."""
        return build_network(self.config)

    def _objective(self) -> nn.Module:
        """The network and its loss in one; see `Objective` for what it takes and returns."""
        return Objective(self.model, self.config)

    @property
    def trained(self) -> nn.Module:
        """The model that is validated and exported: the average of the weights, if it is kept."""
        return self.average.module if self.average is not None else self.model

    def train_step(self, step: int, images: Tensor, labels: Tensor) -> Tensor:
        """One update; (loss, cross-entropy, DAL, accuracy, gradient norm), still on the device."""
        _seed_libraries(derive_seed("step", self.config.seed, step, self.world.rank))
        if self.mix is not None:
            images, labels = self.mix(images, labels)
        puzzle = self.puzzles.at(step)
        images = apply(puzzle, images, self.config.model.patch_size)
        set_learning_rate(self.optimizer, learning_rate(self.config, step, self.steps_per_epoch))
        weight = torch.tensor(
            dal_weight(self.config, step, self.steps_per_epoch), device=images.device
        )
        with self.products:
            with self._autocast():
                loss, numbers = self.objective(images, labels, puzzle.mask, weight)
            loss.backward()
        norm = clipped(list(self.model.parameters()), self.config.recipe.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.model)
        return torch.cat((numbers, norm.detach().view(1)))

    def validated(self, batches: Validation) -> dict[str, float]:
        """The scores on these images, in percent; then training can go on."""
        return {self.measure: self.top1(batches.in_order())}

    @torch.no_grad()
    def top1(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Top-1 in percent on these images, unshuffled; then training can go on."""
        model = self.trained.eval()
        right = torch.zeros(2, device=self.world.device)
        for pixels, labels in batches:
            with self.products, self._autocast():
                predicted = model(pixels).argmax(-1)
            right += torch.stack(((predicted == labels).sum(), torch.tensor(len(labels)).to(right)))
        right = self.world.mean(right)
        self.objective.train()
        return round(float(100 * right[0] / right[1]), 4)

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bfloat16)

    def finite(self) -> bool:
        """Whether all weights are finite numbers."""
        return bool(torch.stack([p.isfinite().all() for p in self.model.parameters()]).all())

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the learner."""
        average = self.average.state_dict() if self.average is not None else None
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": average,
        }

    def restore(self, state: Mapping[str, Any], path: Path) -> None:
        """Continue from what `state` returned in an earlier process; path: of its checkpoint."""
        check_weights(state["model"], self.model.state_dict(), path, "model")
        check_optimizer(state["optimizer"], self.optimizer, path)
        if self.average is not None:
            check_weights(state["average"], self.average.state_dict(), path, "average")
        with STATE.reading(path):
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.average is not None:
                self.average.load_state_dict(state["average"])


def build_mixup(config: TrainingConfig) -> Mixup | None:
    """timm's mixup and cutmix as the config sets them; None if both are off."""
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
    """Seed the libraries' own generators, because timm's mixup and drop path draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def _plain_attention(model: nn.Module) -> None:
    """Switch fused attention off: on a CPU in bfloat16 it takes seven times as long."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010  (mypy: a Module's attribute)
