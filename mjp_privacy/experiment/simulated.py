"""Simulated uploads: clients of the config's models, computed from a folder of private images.

One of the two kinds of `source`. Inputs, moved models and uploads that several cells of a block
share are computed once (`memo`). Images are chosen, prepared, and compared with those that a run
folder was made with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from mjp_privacy.client.feeding import Feeding
from mjp_privacy.client.gradients import FedSGDClient, predict
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import clock
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing, readable_subset
from mjp_privacy.experiment.config import Cell, Experiment
from mjp_privacy.experiment.refusals import META, foreseen
from mjp_privacy.experiment.source import (
    Block0,
    ImageNote,
    ModelUploads,
    ModelVariants,
    Observation,
    UploadSource,
    moved,
)
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import ClientInput, ClientUpdate, Refusal
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.loading import check_values, outline_model


class Simulated(UploadSource):
    """The source that simulates every client from its private images."""

    def __init__(
        self,
        experiment: Experiment,
        images: ImageSource,
        chosen: Sequence[ImageRecord],
        device: torch.device,
    ) -> None:
        self.experiment, self.images, self.device = experiment, images, device
        self.chosen = chosen  # those of `images` that are attacked
        self.data, self.labels = images.path.resolve().name, images.labels_described
        self._outlines: dict[str, ModelVariants] = {}
        self._foreseen: dict[Cell, Refusal | None] = {}

    def records(self, model: str) -> Sequence[ImageRecord]:
        """The chosen images, the same for every model."""
        return self.chosen

    def open(self, model: str) -> SimulatedUploads:
        """Load a model of the config, and check that it can take the images and their labels."""
        config = self.experiment.models[model]
        loaded = load_model(config.model, **config.loading())
        preprocessing(loaded)  # raises if no image can be brought to the model's size
        check_labels(self.chosen, loaded)
        variants = ModelVariants(loaded, self.device, self.experiment.seed)
        return SimulatedUploads(variants, self.images, self.experiment.seed)

    def outline(self, model: str) -> LoadedModel:
        """What the header of the model's weights tells."""
        if model not in self._outlines:
            config = self.experiment.models[model]
            outline = outline_model(config.model, whole=True, **config.loading())
            self._outlines[model] = ModelVariants(outline, META)
        return self._outlines[model].model

    def foresee(
        self,
        cell: Cell,
        names: Callable[[LoadedModel], Sequence[str]],
        records: Sequence[ImageRecord],
    ) -> Refusal | None:
        """What the model's outline and the client's config tell; images make no difference."""
        if cell not in self._foreseen:
            self.outline(cell.model)
            self._foreseen[cell] = foreseen(self._outlines[cell.model], cell, names)
        return self._foreseen[cell]

    def check_models(self) -> None:
        """Raise before any work where none of the grid's models can be loaded. Where some can, the
        others' cells are rows with their reason."""
        used = {name for entry in self.experiment.grid for name in entry.models}
        refused: dict[str, str] = {}
        for label in (name for name in self.experiment.models if name in used):
            config = self.experiment.models[label]
            try:
                self.outline(label)
                check_values(config.model, config.checkpoint)
                return
            except UserError as error:
                refused[label] = str(error)
        reasons = list(dict.fromkeys(refused.values()))
        if len(reasons) == 1:
            raise UserError(reasons[0])
        listed = "\n".join(f"  {shown(name)}: {reason}" for name, reason in refused.items())
        raise UserError(f"None of the {len(refused)} models can be loaded:\n{listed}")

    def check(self, store: RunStore) -> list[str]:
        """Raise if the run folder holds other images; ids of those that are no longer given."""
        return check_same_images(store, self.images, self.chosen)


class SimulatedUploads(ModelUploads):
    """The clients of one model, on one block of images at a time."""

    def __init__(self, variants: ModelVariants, source: ImageSource, seed: int) -> None:
        super().__init__(variants)
        self.source, self.seed = source, seed
        self._gradient_seconds = 0.0

    def read(self, records: Sequence[ImageRecord]) -> None:
        """Decode the images at the model's input size."""
        prepare, source = preprocessing(self.model), self.source
        for record in records:
            sha256 = file_sha256(source, record)
            try:
                picture = source.decode(record, min_side=self.model.patch_size)
            except ImageError as error:
                self.notes.append(ImageNote(record, sha256, "", error.reason))
                continue
            self.images[record] = prepare(picture)
            self.notes.append(ImageNote(record, sha256, pixel_sha256(picture)))

    def accuracy_model(self, cell: Cell, block0: Block0) -> LoadedModel:
        """The float32 model with the position table and the adapters of the cell's client."""
        client = cell.client
        return self.variants.of(block0, "float32", client.positions, client.adapters)

    def observe(
        self,
        cell: Cell,
        names: Sequence[str],
        records: Sequence[ImageRecord],
    ) -> Observation:
        """Feed the images to the cell's client and compute its uploads, one for each round."""
        patch = self.model.patch_size
        feeding = Feeding(cell.client, cell.setting, cell.gamma, patch, self.seed)
        photographs = torch.stack([self.images[record] for record in records])
        ids = tuple(record.image_id for record in records)
        labels = self.memo.once(("labels", ids), lambda: self._labels(records, photographs))
        batch = _Batch(ids, photographs, labels)
        rounds = []  # of each round the inputs of its local steps
        for number in range(cell.uploads or 1):
            ordered = batch.ordered(feeding.order(ids, number))
            steps = feeding.rounds_of_steps(number)
            rounds.append([self._input(feeding, ordered, step) for step in steps])
        first = [steps[0] for steps in rounds]
        plain = self._photographs(feeding, batch, 0)
        labels = first[0].labels
        if not cell.uploads:
            return Observation(cell, photographs, plain, first[0], [self.model], [], labels)
        self._gradient_seconds = 0.0
        models = self._models(cell, first)
        updates = self._updates(cell, names, rounds, models)
        seconds = {"gradient": self._gradient_seconds} if self._gradient_seconds else {}
        return Observation(cell, photographs, plain, first[0], models, updates, labels, seconds)

    # inputs -----------------------------------------------------------------------------------

    def _photographs(self, feeding: Feeding, batch: _Batch, round: int) -> Tensor:
        """The images as they enter this round: augmented, not shuffled."""
        photographs: Tensor = self.memo.once(
            ("photographs", feeding, batch.ids, round),
            lambda: feeding.photographs(batch.images, batch.ids, round),
        )
        return photographs

    def _input(self, feeding: Feeding, batch: _Batch, round: int) -> ClientInput:
        plain = self._photographs(feeding, batch, round)
        inputs: ClientInput = self.memo.once(
            ("input", feeding, batch.ids, round),
            lambda: feeding.puzzled(plain, batch.labels, batch.ids, round),
        )
        return inputs

    def _labels(self, records: Sequence[ImageRecord], images: Tensor) -> Tensor:
        """True labels; for an image without one, the intact model's prediction on that image."""
        labels = torch.tensor([-1 if r.label is None else r.label for r in records])
        if (labels < 0).any():
            labels = torch.where(labels < 0, predict(self.model, images, None), labels)
        return labels

    # uploads ----------------------------------------------------------------------------------

    def _models(self, cell: Cell, rounds: Sequence[ClientInput]) -> list[LoadedModel]:
        """The model that the clients train in each of these rounds."""
        config = cell.client
        models = [self.variants.of(cell.victim, cell.dtype, config.positions, config.adapters)]
        for round, inputs in enumerate(rounds[:-1], 1):
            if not config.server_lr:
                models.append(models[0])
                continue
            client = FedSGDClient(models[-1], config)
            key = ("model", federation_key(cell), inputs.image_ids, round)
            models.append(self._timed(key, partial(moved, client, inputs)))
        return models

    def _updates(
        self,
        cell: Cell,
        names: Sequence[str],
        rounds: Sequence[Sequence[ClientInput]],
        models: Sequence[LoadedModel],
    ) -> list[ClientUpdate]:
        """The client's upload in each round, which has one input for every local step."""
        updates: list[ClientUpdate] = []
        for round, (model, steps) in enumerate(zip(models, rounds, strict=True)):
            parameters = {name for name, _ in model.named_parameters()}
            wanted = [name for name in names if name in parameters]
            key = ("update", federation_key(cell), steps[0].image_ids, round)
            make = partial(make_upload, model, steps, cell.client, names=wanted)
            updates.append(self._timed(key, partial(make, round=round, seed=self.seed)))
        return updates

    def _timed(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What `make` returns, computed once; the time counts for the first cell that needs it."""
        device = self.model.like.device

        def timed() -> Any:
            started = clock(device)
            value = make()
            self._gradient_seconds += clock(device) - started
            return value

        return self.memo.once(key, timed)


@dataclass(frozen=True)
class _Batch:
    """Images of a block that are observed together."""

    ids: tuple[str, ...]
    images: Tensor
    labels: Tensor

    def ordered(self, order: Tensor) -> _Batch:
        """The same images in another order."""
        ids = tuple(self.ids[place] for place in order.tolist())
        return _Batch(ids, self.images[order], self.labels[order])


def federation_key(cell: Cell) -> tuple[Any, ...]:
    """Everything in the config that a round's model and upload depend on; a key for `Memo`."""
    return cell.victim, cell.setting, cell.gamma, cell.dtype, cell.client


# the images ---------------------------------------------------------------------------------------

KNOWN_BY = ("image_id", "status", "label", "sha256", "pixel_sha256")


def chosen_images(
    source: ImageSource, experiment: Experiment, limit: int | None
) -> tuple[tuple[ImageRecord, ...], list[ImageNote]]:
    """The images that are attacked, and notes on files that are no images and were replaced.

    chosen_images(open_images("photographs"), experiment, limit=20)

    Only a limit replaces files: without one every file is taken, and one that is no image has rows
    that say so.
    """
    records = source.records
    if (
        choice := experiment.classes
    ) is not None:  # an image without a label belongs to every class
        records = tuple(r for r in records if r.label is None or choice.holds(r.label))
        if not records:
            raise UserError(
                f"None of the {len(source.records)} images of {source.path} has a class index that "
                f"leaves {', '.join(map(str, choice.remainders))} when divided by {choice.modulo} "
                "(the config's `classes`). Give images of these classes, or remove `classes`."
            )
    chosen, no_images = readable_subset(source, records, limit, experiment.seed)
    notes = [
        ImageNote(record, file_sha256(source, record), "", f"{reason}; another file replaced it")
        for record, reason in no_images.items()
    ]
    return chosen, notes


def check_same_images(
    store: RunStore, source: ImageSource, chosen: Sequence[ImageRecord]
) -> list[str]:
    """Raise if a chosen image has other pixels or another label than the run folder's image of the
    same id: its rows would be another image's.

    Returns the ids of images that the folder holds and `source` no longer does.
    """
    known = _known_images(store)
    available = {record.image_id for record in source.records}
    absent = [name for name in known if name not in available]
    if absent and not available & known.keys():
        _refuse(store, absent, "are not among these images", "the images it was made with")
    again = [(record, known[record.image_id]) for record in chosen if record.image_id in known]
    relabelled = [
        record.image_id
        for record, before in again  # one that had no label may get one: rows of another run_id
        if not (record.label is None or pd.isna(before["label"]))
        and int(before["label"]) != record.label
    ]
    _refuse(store, relabelled, "had another label", "the labels it was made with")
    changed = []
    for record, before in again:
        try:
            same = file_sha256(source, record) == before["sha256"]
            same = same or pixel_sha256(source.decode(record)) == before["pixel_sha256"]
        except ImageError:
            same = False
        changed += [] if same else [record.image_id]
    _refuse(store, changed, "had other pixels", "the same pixels under the same name")
    return absent


def _known_images(store: RunStore) -> dict[str, dict[str, Any]]:
    """The images of the folder that could be read, with their hashes, and with the label that any
    of its cells has of them: some may be of the time before there were labels."""
    known: dict[str, dict[str, Any]] = {}
    for run_id in store.stored_cells():
        ids = {name for names in store.cell(run_id).ids for name in names}
        told = {name for name, of_image in known.items() if not pd.isna(of_image["label"])}
        if told >= ids or "pixel_sha256" not in store.cell(run_id).columns:
            continue
        rows = store.read(run_id, KNOWN_BY)
        rows = rows[(rows["status"] != "unreadable") & rows["pixel_sha256"].fillna("").ne("")]
        for row in rows.to_dict("records"):
            of_image = known.setdefault(str(row["image_id"]), {str(k): v for k, v in row.items()})
            if pd.isna(of_image["label"]):
                of_image["label"] = row["label"]
    return known


def _refuse(store: RunStore, image_ids: Sequence[str], fault: str, expected: str) -> None:
    """Raise if there are any such images."""
    if image_ids:
        raise UserError(
            f"{len(image_ids)} image(s) of the run folder {store.root} {fault}: "
            f"{first_of(image_ids, 3)}. Expected {expected}. Give these, or another --out."
        )


def check_labels(records: Sequence[ImageRecord], model: LoadedModel) -> None:
    """Raise unless every label is a class index of the model."""
    classes = model.card.num_classes
    labels = {r.image_id: r.label for r in records if r.label is not None}
    wrong = [name for name, label in labels.items() if not 0 <= label < classes]
    if wrong:
        raise UserError(
            f"Image {wrong[0]} has label {labels[wrong[0]]}, but the model has {classes} "
            f"classes, 0 to {classes - 1} ({len(wrong)} such images). Give the labels of the "
            "model's own classes with --labels, or images without labels."
        )


def file_sha256(source: ImageSource, record: ImageRecord) -> str:
    """The SHA-256 of an image's file; "" where the file cannot be read."""
    try:
        return hashlib.sha256(source.read_bytes(record)).hexdigest()
    except ImageError:
        return ""


def pixel_sha256(picture: Image.Image) -> str:
    """The SHA-256 of a picture's size and pixels, which re-encoding its file does not change."""
    return hashlib.sha256(f"{picture.size} ".encode() + picture.tobytes()).hexdigest()


def preprocessing(model: LoadedModel) -> Preprocessing:
    """The resizing and cropping that brings a picture to the model's input size."""
    card = model.card
    return Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
