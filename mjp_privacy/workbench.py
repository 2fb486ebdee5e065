"""A model and what its cells share: precisions, inputs, gradients, accuracies, each made once."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attacks.controls import oracle_inverse
from mjp_privacy.clients.fedsgd import FedSGDClient, predict
from mjp_privacy.config import Cell, Experiment
from mjp_privacy.data import ImageRecord
from mjp_privacy.interfaces import Attack, ClientInput, ClientUpdate, Pixels
from mjp_privacy.models import Victim
from mjp_privacy.models.closed_form_block import with_closed_form_block
from mjp_privacy.settings import SETTINGS


class Workbench:
    """A model in the precisions and alterations that its cells need."""

    def __init__(self, model: Victim, experiment: Experiment, device: torch.device) -> None:
        self.model = model.to(device)
        self.experiment, self.device = experiment, device
        card = model.card
        self.pixels = Pixels(card.img_size, card.mean, card.std)
        self._victims: dict[tuple[str, str], Victim] = {("intact", "float32"): self.model}
        self._made: dict[tuple[Any, ...], Any] = {}

    def forget(self) -> None:
        """Drop what was made for one block."""
        self._made.clear()

    def victim(self, kind: str, dtype: str) -> Victim:
        key = (kind, dtype)
        if key not in self._victims:
            make = with_closed_form_block if kind == "april_block" else copy.deepcopy
            victim = make(self.model)  # a copy: the intact float32 model stays as it is
            self._victims[key] = victim.to(getattr(torch, dtype))  # type: ignore[assignment]
        return self._victims[key]

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def inputs(
        self, cell: Cell, records: Sequence[ImageRecord], images: Tensor, round: int = 0
    ) -> ClientInput:
        """What the client feeds its model in a round; scores are made with that of round 0."""
        ids = tuple(record.image_id for record in records)
        labels = self._once(("labels", ids), lambda: self._labels(records, images))
        return self._once(
            ("inputs", cell.setting, cell.gamma, ids, round),
            lambda: SETTINGS[cell.setting].prepare(
                images,
                labels,
                ids,
                patch_size=self.model.patch_size,
                gamma=cell.gamma,
                round=round,
                seed=self.experiment.seed,
            ),
        )

    def _labels(self, records: Sequence[ImageRecord], images: Tensor) -> Tensor:
        """True labels; for images without one the intact model's prediction on the plain image."""
        labels = torch.tensor([-1 if r.label is None else r.label for r in records])
        if (labels < 0).any():
            labels = torch.where(labels < 0, predict(self.model, images, None), labels)
        return labels

    def updates(
        self,
        cell: Cell,
        attack: Attack,
        needs: Sequence[str],
        rounds: Sequence[ClientInput],
        seconds: dict[str, float],
    ) -> list[ClientUpdate]:
        """The client's uploads of these rounds, each made once for all attacks that see it; the
        time goes to the first cell that asks."""
        victim = self.victim(attack.victim, cell.dtype)
        own = {name for name, _ in victim.named_parameters()}
        names = [name for name in needs if name in own]
        client = FedSGDClient(victim, cell.client)
        shared = ("update", attack.victim, cell.setting, cell.gamma, cell.dtype, cell.client)

        def timed(round: int, inputs: ClientInput) -> ClientUpdate:
            started = self.clock()
            update = replace(client.update(inputs, names=names), round=round)
            seconds["gradient"] = seconds.get("gradient", 0.0) + self.clock() - started
            return update

        return [
            self._once((*shared, inputs.image_ids, round), partial(timed, round, inputs))
            for round, inputs in enumerate(rounds)
        ]

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
            key = ("accuracy", kind, cell.setting, cell.gamma, inputs.image_ids)
            model = self.victim(kind, "float32")
            predicted = self._once(key, partial(predict, model, inputs.images, inputs.mask))
            correct[variant] = predicted == inputs.labels
        return correct

    def oracle(self, cell: Cell, inputs: ClientInput) -> Tensor:
        """The rank ceiling's images: what the client fed through W and its inverse."""
        return self._once(
            ("oracle", cell.setting, cell.gamma, inputs.image_ids),
            lambda: oracle_inverse(self.model, inputs.images.to(self.device)).cpu(),
        )
