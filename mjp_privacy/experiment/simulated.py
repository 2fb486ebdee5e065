"""A model and what its cells share: precisions, inputs, gradients, accuracies, each made once."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attacks.controls import oracle_inverse
from mjp_privacy.client.augmentation import augmented
from mjp_privacy.client.config import local_round
from mjp_privacy.client.federation_step import moved
from mjp_privacy.client.gradients import FedSGDClient, predict
from mjp_privacy.client.positions import with_sinusoidal_positions
from mjp_privacy.client.puzzles import step_puzzles
from mjp_privacy.client.settings import SETTINGS
from mjp_privacy.client.upload import make_upload
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.config import Cell, Experiment
from mjp_privacy.interfaces import Attack, ClientInput, ClientUpdate, Pixels
from mjp_privacy.models import Victim
from mjp_privacy.models.mjp_vit import with_closed_form_block


class Workbench:
    """A model in the precisions and alterations that its cells need."""

    has_truth = True

    def __init__(self, model: Victim, experiment: Experiment, device: torch.device) -> None:
        self.model = model.to(device)
        self.experiment, self.device = experiment, device
        card = model.card
        self.pixels = Pixels(card.img_size, card.mean, card.std)
        self._victims: dict[tuple[str, str, str], Victim] = {}
        self._made: dict[tuple[Any, ...], Any] = {}

    def forget(self) -> None:
        """Drop what was made for one block."""
        self._made.clear()

    def lacks(self, attack: Attack, records: Sequence[ImageRecord]) -> str | None:
        """Why uploads as this attack needs them cannot be had of these images, or None."""
        return None

    def known_labels(self, inputs: ClientInput) -> Tensor | None:
        """What the attacker knows of them."""
        return inputs.labels

    def victim(self, kind: str, dtype: str, positions: str = "own") -> Victim:
        """The model that the client trains; the intact float32 one is the model itself."""
        key = (kind, dtype, positions)
        if key == ("intact", "float32", "own"):
            return self.model
        if key not in self._victims:
            base = self.model if positions == "own" else with_sinusoidal_positions(self.model)
            make = with_closed_form_block if kind == "april_block" else copy.deepcopy
            victim = make(base)  # a copy: the intact float32 model stays as it is
            self._victims[key] = victim.to(getattr(torch, dtype))  # type: ignore[assignment]
        return self._victims[key]

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def photographs(
        self, cell: Cell, records: Sequence[ImageRecord], images: Tensor, round: int = 0
    ) -> Tensor:
        """The images as they enter a round, before any shuffle."""
        ids = tuple(record.image_id for record in records)
        kind, seed = cell.client.augment, self.experiment.seed
        return self._once(
            ("photographs", kind, ids, round),
            lambda: augmented(images, ids, kind, round=round, seed=seed),
        )

    def inputs(
        self, cell: Cell, records: Sequence[ImageRecord], images: Tensor, round: int = 0
    ) -> ClientInput:
        """What the client feeds its model in a round; scores are made with that of round 0."""
        ids = tuple(record.image_id for record in records)
        labels = self._once(("labels", ids), lambda: self._labels(records, images))
        plain = self.photographs(cell, records, images, round)

        def prepare() -> ClientInput:
            named = {"patch_size": self.model.patch_size, "round": round}
            seed = self.experiment.seed
            fed = SETTINGS[cell.setting].prepare(
                plain, labels, ids, gamma=cell.gamma, seed=seed, **named
            )
            return step_puzzles(fed, plain, cell.client, seed=seed, **named)

        return self._once(("inputs", *_puzzle_of(cell), ids, round), prepare)

    def steps(
        self, cell: Cell, records: Sequence[ImageRecord], images: Tensor, round: int
    ) -> list[ClientInput]:
        """What the client feeds in each of a round's local steps: the same images, puzzled and
        augmented anew."""
        numbers = [local_round(round, step) for step in range(cell.client.steps)]
        return [self.inputs(cell, records, images, number) for number in numbers]

    def _labels(self, records: Sequence[ImageRecord], images: Tensor) -> Tensor:
        """True labels; for images without one the intact model's prediction on the plain image."""
        labels = torch.tensor([-1 if r.label is None else r.label for r in records])
        if (labels < 0).any():
            labels = torch.where(labels < 0, predict(self.model, images, None), labels)
        return labels

    def models(
        self,
        cell: Cell,
        attack: Attack,
        rounds: Sequence[ClientInput],
        seconds: dict[str, float],
    ) -> list[Victim]:
        """The model that the clients train in each of these rounds."""
        models = [self.victim(attack.victim, cell.dtype, cell.client.positions)]
        for round, inputs in enumerate(rounds[:-1], 1):
            key = ("model", *_federation_of(cell, attack), inputs.image_ids, round)
            step = partial(moved, FedSGDClient(models[-1], cell.client), inputs)
            models.append(self._timed(key, step, seconds) if cell.client.server_lr else models[0])
        return models

    def updates(
        self,
        cell: Cell,
        attack: Attack,
        needs: Sequence[str],
        rounds: Sequence[Sequence[ClientInput]],
        models: Sequence[Victim],
        seconds: dict[str, float],
    ) -> list[ClientUpdate]:
        """The client's uploads of these rounds, each of one input for every local step; made once
        for all attacks that see it."""
        updates = []
        for round, (model, steps) in enumerate(zip(models, rounds, strict=True)):
            key = ("update", *_federation_of(cell, attack), steps[0].image_ids, round)
            make = partial(self._update, cell, model, needs, steps, round)
            updates.append(self._timed(key, make, seconds))
        return updates

    def _timed(
        self, key: tuple[Any, ...], make: Callable[[], Any], seconds: dict[str, float]
    ) -> Any:
        """Once; its time goes to the first cell that asks for it."""

        def timed() -> Any:
            started = self.clock()
            made = make()
            seconds["gradient"] = seconds.get("gradient", 0.0) + self.clock() - started
            return made

        return self._once(key, timed)

    def _update(
        self,
        cell: Cell,
        model: Victim,
        needs: Sequence[str],
        steps: Sequence[ClientInput],
        round: int,
    ) -> ClientUpdate:
        own = {name for name, _ in model.named_parameters()}
        names = [name for name in needs if name in own]
        seed = self.experiment.seed
        return make_upload(model, steps, cell.client, names=names, round=round, seed=seed)

    def clock(self) -> float:
        """Seconds, once the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()

    def accuracy(self, cell: Cell, inputs: ClientInput, labelled: bool) -> dict[str, Tensor | None]:
        """Whether the intact and the altered model are right on this row's input."""
        if not labelled:
            return {"intact": None, "altered": None}
        correct: dict[str, Tensor | None] = {}
        for variant, kind in (("intact", "intact"), ("altered", "april_block")):
            positions = cell.client.positions
            key = ("accuracy", kind, positions, *_puzzle_of(cell), inputs.image_ids)
            model = self.victim(kind, "float32", positions)
            predicted = self._once(key, partial(predict, model, inputs.images, inputs.mask))
            correct[variant] = predicted == inputs.labels
        return correct

    def oracle(self, cell: Cell, inputs: ClientInput) -> Tensor:
        """The rank ceiling's images: what the client fed through W and its inverse."""
        return self._once(
            ("oracle", *_puzzle_of(cell), inputs.image_ids),
            lambda: oracle_inverse(self.model, inputs.images.to(self.device)).cpu(),
        )


def _puzzle_of(cell: Cell) -> tuple[Any, ...]:
    """What decides a client's input."""
    client = cell.client
    step = (client.plain_share, client.mask, client.batch, client.augment)
    return cell.setting, cell.gamma, *step


def _federation_of(cell: Cell, attack: Attack) -> tuple[Any, ...]:
    """What decides a round's model and upload."""
    return attack.victim, cell.setting, cell.gamma, cell.dtype, cell.client
