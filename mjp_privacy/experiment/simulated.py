"""Uploads made here: clients of the config's models on a folder of images."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.client.feeding import Feeding
from mjp_privacy.client.gradients import FedSGDClient, predict
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.device import clock
from mjp_privacy.data import ImageError, ImageRecord, ImageSource
from mjp_privacy.experiment.block import Block, ImageNote
from mjp_privacy.experiment.config import Cell, Experiment
from mjp_privacy.experiment.inventory import Inventory, check_labels, pixel_sha256, preprocessing
from mjp_privacy.experiment.memo import Memo
from mjp_privacy.experiment.source import Observation
from mjp_privacy.experiment.variants import Block0, ModelVariants
from mjp_privacy.interfaces import Attack, ClientInput, ClientUpdate, Refusal
from mjp_privacy.models import LoadedModel, load_model


@dataclass(frozen=True)
class Simulated:
    """A source of uploads: every client is simulated from its private images."""

    experiment: Experiment
    images: ImageSource
    chosen: Sequence[ImageRecord]  # of the source's images, those that are attacked
    device: torch.device

    @property
    def data(self) -> str:
        return self.images.path.resolve().name

    @property
    def labels(self) -> str:
        return self.images.labels_described

    def records(self, model: str) -> Sequence[ImageRecord]:
        return self.chosen

    def columns(self, model: str) -> Mapping[str, Any]:
        return {}

    def open(self, model: str) -> SimulatedModel:
        config = self.experiment.models[model]
        loaded = load_model(config.model, **config.loading())
        preprocessing(loaded)  # refuses sizes that no image can be brought to
        check_labels(self.chosen, loaded)
        return SimulatedModel(self, ModelVariants(loaded, self.device))

    def check(self, inventory: Inventory) -> list[str]:
        return inventory.check_known(self.images, self.chosen)


@dataclass(frozen=True)
class SimulatedModel:
    """One model of the config, loaded."""

    source: Simulated
    variants: ModelVariants

    @property
    def model(self) -> LoadedModel:
        return self.variants.model

    def block(self, block: Block) -> SimulatedBlock:
        """The block's images, decoded as the model takes them."""
        images, notes = {}, []
        prepare, source = preprocessing(self.model), self.source.images
        for record in block.records:
            try:
                picture = source.decode(record, min_side=self.model.patch_size)
            except ImageError as error:
                notes.append(ImageNote(record, _file_sha256(source, record), "", error.reason))
                continue
            images[record] = prepare(picture)
            notes.append(ImageNote(record, _file_sha256(source, record), pixel_sha256(picture)))
        return SimulatedBlock(self.variants, self.source.experiment.seed, images, notes)


def _file_sha256(source: ImageSource, record: ImageRecord) -> str:
    try:
        return hashlib.sha256(source.read_bytes(record)).hexdigest()
    except ImageError:
        return ""


class SimulatedBlock:
    """The clients of one block of images; inputs, gradients and weights are made once for all
    cells that share them."""

    scored = True

    def __init__(
        self,
        variants: ModelVariants,
        seed: int,
        images: Mapping[ImageRecord, Tensor],
        notes: Sequence[ImageNote],
    ) -> None:
        self.variants, self.seed, self.images, self.notes = variants, seed, images, notes
        self.memo = Memo()
        self._gradient_seconds = 0.0

    def lacks(self, attack: Attack, records: Sequence[ImageRecord]) -> Refusal | None:
        return None

    def accuracy_model(self, cell: Cell, block0: Block0) -> LoadedModel:
        return self.variants.of(block0, "float32", cell.client.positions)

    def observe(
        self,
        cell: Cell,
        attack: Attack | None,
        names: Sequence[str],
        records: Sequence[ImageRecord],
    ) -> Observation:
        feeding = self._feeding(cell)
        photographs = torch.stack([self.images[record] for record in records])
        batch = _Batch(tuple(record.image_id for record in records), photographs)
        rounds = [
            [self._input(feeding, batch, records, number) for number in feeding.rounds_of_steps(r)]
            for r in range(1 if attack is None else attack.uploads)
        ]
        first = [steps[0] for steps in rounds]
        plain = self._photographs(feeding, batch, 0)
        if attack is None:
            return Observation(
                photographs, plain, first[0], [self.variants.model], [], first[0].labels
            )
        self._gradient_seconds = 0.0
        models = self._models(cell, attack, first)
        updates = self._updates(cell, attack, names, rounds, models)
        seconds = {"gradient": self._gradient_seconds} if self._gradient_seconds else {}
        return Observation(photographs, plain, first[0], models, updates, first[0].labels, seconds)

    # inputs -----------------------------------------------------------------------------------

    def _feeding(self, cell: Cell) -> Feeding:
        patch = self.variants.model.patch_size
        return Feeding(cell.client, cell.setting, cell.gamma, patch, self.seed)

    def _photographs(self, feeding: Feeding, batch: _Batch, round: int) -> Tensor:
        photographs: Tensor = self.memo.once(
            ("photographs", feeding, batch.ids, round),
            lambda: feeding.photographs(batch.images, batch.ids, round),
        )
        return photographs

    def _input(
        self, feeding: Feeding, batch: _Batch, records: Sequence[ImageRecord], round: int
    ) -> ClientInput:
        labels = self.memo.once(("labels", batch.ids), lambda: self._labels(records, batch.images))
        plain = self._photographs(feeding, batch, round)
        fed: ClientInput = self.memo.once(
            ("input", feeding, batch.ids, round),
            lambda: feeding.puzzled(plain, labels, batch.ids, round),
        )
        return fed

    def _labels(self, records: Sequence[ImageRecord], images: Tensor) -> Tensor:
        """True labels; for images without one the intact model's prediction on the plain image."""
        labels = torch.tensor([-1 if r.label is None else r.label for r in records])
        if (labels < 0).any():
            labels = torch.where(labels < 0, predict(self.variants.model, images, None), labels)
        return labels

    # uploads ----------------------------------------------------------------------------------

    def _models(
        self, cell: Cell, attack: Attack, rounds: Sequence[ClientInput]
    ) -> list[LoadedModel]:
        """The model that the clients train in each of these rounds."""
        models = [self.variants.of(attack.victim, cell.dtype, cell.client.positions)]
        for round, inputs in enumerate(rounds[:-1], 1):
            if not cell.client.server_lr:
                models.append(models[0])
                continue
            client = FedSGDClient(models[-1], cell.client)
            key = ("model", _federation_of(cell, attack), inputs.image_ids, round)
            models.append(self._timed(key, partial(moved, client, inputs)))
        return models

    def _updates(
        self,
        cell: Cell,
        attack: Attack,
        names: Sequence[str],
        rounds: Sequence[Sequence[ClientInput]],
        models: Sequence[LoadedModel],
    ) -> list[ClientUpdate]:
        """The client's uploads of these rounds, each of one input for every local step."""
        updates = []
        for round, (model, steps) in enumerate(zip(models, rounds, strict=True)):
            own = {name for name, _ in model.named_parameters()}
            wanted = [name for name in names if name in own]
            named = {"names": wanted, "round": round, "seed": self.seed}
            make = partial(make_upload, model, steps, cell.client, **named)  # type: ignore[arg-type]
            key = ("update", _federation_of(cell, attack), steps[0].image_ids, round)
            updates.append(self._timed(key, make))
        return updates

    def _timed(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Once; its time goes to the first cell that asks for it."""
        device = self.variants.model.cls_token.device

        def timed() -> Any:
            started = clock(device)
            made = make()
            self._gradient_seconds += clock(device) - started
            return made

        return self.memo.once(key, timed)


@dataclass(frozen=True)
class _Batch:
    """Images of a block that are observed together."""

    ids: tuple[str, ...]
    images: Tensor


def _federation_of(cell: Cell, attack: Attack) -> tuple[Any, ...]:
    """What decides a round's model and upload."""
    return attack.victim, cell.setting, cell.gamma, cell.dtype, cell.client


def moved(client: FedSGDClient, inputs: ClientInput) -> LoadedModel:
    """A copy of the client's model after a server's step on this round.

    All clients of a round see the same weights w, and the server takes one step along the mean of
    their gradients over every image of the block, w - server_lr * mean gradient; parameters whose
    gradient is withheld stay.
    """
    mean = client.mean_gradient(inputs)
    model = copy.deepcopy(client.model)
    with torch.no_grad():
        for name, gradient in mean.items():
            model.get_parameter(name).sub_(gradient, alpha=client.config.server_lr)
    return model
