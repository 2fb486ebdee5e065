"""Simulated uploads: clients of the config's models, computed from a folder of private images.

One of the two kinds of `source`. Inputs, moved models and uploads that several cells of a block
share are computed once (`memo`). Images are chosen, prepared, and compared with those that a run
folder was made with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import Feeding
from mjp_privacy.client.gradients import TABLES, FedSGDClient, predict
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import clock
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.data import ImageError, ImageRecord, ImageSource, Preprocessing, readable_subset
from mjp_privacy.experiment.config import Cell, Experiment, client_fields
from mjp_privacy.experiment.source import (
    Block0,
    ImageNote,
    ModelUploads,
    ModelVariants,
    Observation,
    UploadSource,
)
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.loading import check_values, outline_model
from mjp_privacy.models.vit import copied


class Simulated(UploadSource):
    """The source that simulates every client from its private images."""

    recorded = False

    def __init__(
        self,
        experiment: Experiment,
        images: ImageSource,
        chosen: Sequence[ImageRecord],
        device: torch.device,
    ) -> None:
        super().__init__(device)
        self.experiment, self.images = experiment, images
        self.chosen = chosen  # those of `images` that are attacked
        self.data, self.labels = images.path.resolve().name, images.labels_described
        self._outlines: dict[str, LoadedModel] = {}

    def records(self, model: str) -> Sequence[ImageRecord]:
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
        if model not in self._outlines:
            config = self.experiment.models[model]
            self._outlines[model] = outline_model(config.model, whole=True, **config.loading())
        check_labels(self.chosen, self._outlines[model])
        return self._outlines[model]

    def check_models(self) -> None:
        """Raise before any work where none of the grid's models can be loaded and has the labels'
        classes. Where some can, the others' cells are rows with their reason."""
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
        raise UserError(f"None of the {len(refused)} models can be attacked:\n{listed}")

    def check_withheld(self) -> None:
        """Raise before any work where a client of the grid withholds a parameter that none of its
        models has. Where some have it, the others' cells are rows with their reason."""
        for entry in self.experiment.grid:
            client = ClientConfig(**client_fields(entry, self.experiment))
            existing: set[str] = set()
            try:
                for name in entry.models:
                    own = self.outline(name).named_parameters()
                    existing |= {parameter for parameter, _ in own}
            except UserError:  # a model that cannot be opened may have it
                continue
            unknown = [n for n in client.withhold if n not in existing and n not in TABLES]
            if unknown and client.adapters is None:  # whose own parameters may be withheld
                raise UserError(
                    f"client.withhold: expected parameters of {first_of(entry.models, 3)}, got "
                    f"{shown(unknown[0])!r}.{did_you_mean(unknown[0], sorted(existing))} Mend that "
                    "name, or leave it out."
                )

    def choose(self, limit: int | None) -> None:
        """Choose the images that are attacked, and pass over files that are no images, or are
        smaller than the patch of a model that is attacked.

        Only a limit replaces files: without one every file is taken, and one that cannot be used
        has rows that say so. An image without a label belongs to every class.
        """
        images, choice = self.images, self.experiment.classes
        records = images.records
        if choice is not None:
            records = tuple(r for r in records if r.label is None or choice.holds(r.label))
            if not records:
                raise UserError(
                    f"None of the {len(images.records)} images of {images.path} has a class index "
                    f"that leaves {', '.join(map(str, choice.remainders))} when divided by "
                    f"{choice.modulo} (the config's `classes`). Give images of these classes, or "
                    "remove `classes`."
                )
        least, seed = 1, self.experiment.seed
        used = {name for entry in self.experiment.grid for name in entry.models}
        for name in used if limit is not None else ():
            with suppress(UserError):  # its cells are rows with this reason
                least = max(least, self.outline(name).patch_size)
        self.chosen, unusable = readable_subset(images, records, limit, seed, min_side=least)
        replaced = "; another file replaced it" if len(self.chosen) == limit else ""
        self.passed_over = [
            ImageNote(record, file_sha256(images, record), "", f"{why}{replaced}")
            for record, why in unusable.items()
        ]

    def check(self, store: RunStore) -> list[str]:
        """Raise if a chosen image has other pixels or another label than the run folder's image of
        the same id: its rows would be another image's."""
        known = _known_images(store)
        available = {record.image_id for record in self.images.records}
        absent = [name for name in known if name not in available]
        gone = absent if len(absent) == len(known) else []
        relabelled, changed = [], []
        for record in (record for record in self.chosen if record.image_id in known):
            before = known[record.image_id]
            # an image that had no label may get one: its rows are then of another run_id
            if record.label is not None and before["label"] not in (None, record.label):
                relabelled.append(record.image_id)
            same = file_sha256(self.images, record) == before["sha256"]
            with suppress(ImageError):
                same = same or pixel_sha256(self.images.decode(record)) == before["pixel_sha256"]
            if not same:
                changed.append(record.image_id)
        for names, fault, expected in (
            (gone, "are not among these images", "the images it was made with"),
            (relabelled, "had another label", "the labels it was made with"),
            (changed, "had other pixels", "the same pixels under the same name"),
        ):
            if names:
                raise UserError(
                    f"{len(names)} image(s) of the run folder {store.root} {fault}: "
                    f"{first_of(names, 3)}. Expected {expected}. Give these, or another --out."
                )
        return absent


class SimulatedUploads(ModelUploads):
    """The clients of one model, on one block of images at a time."""

    def __init__(self, variants: ModelVariants, source: ImageSource, seed: int) -> None:
        super().__init__(variants)
        self.source, self.seed = source, seed

    def read(self, records: Sequence[ImageRecord]) -> None:
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
        client = cell.client
        return self.variants.of(block0, "float32", client.positions, client.adapters)

    def observe(
        self, cell: Cell, names: Sequence[str], records: Sequence[ImageRecord]
    ) -> Observation:
        """Feed the images to the cell's client and compute its uploads, one for each round."""
        client, seed, memo = cell.client, self.seed, self.memo
        feeding = Feeding(client, cell.setting, cell.gamma, self.model.patch_size, seed)
        photographs = torch.stack([self.images[record] for record in records])
        ids = tuple(record.image_id for record in records)
        labels = memo.once(("labels", ids), lambda: self._labels(records, photographs))
        rounds: list[list[ClientInput]] = []  # of each round the inputs of its local steps
        for round in range(cell.uploads or 1):
            order = feeding.order(ids, round)
            fed = tuple(ids[place] for place in order.tolist())
            images = photographs[order], labels[order], fed
            steps = []
            for number in feeding.rounds_of_steps(round):
                feed = partial(feeding.input, *images, number)
                steps.append(memo.once(("input", feeding, fed, number), feed))
            rounds.append(steps)
        first, plain = rounds[0][0], feeding.photographs(photographs, ids, 0)
        if not cell.uploads:
            return Observation(cell, photographs, plain, first, [self.model], [], first.labels)
        models: list[LoadedModel] = []
        updates: list[ClientUpdate] = []
        model = self.variants.of(cell.victim, cell.dtype, client.positions, client.adapters)
        device, known_before = self.model.like.device, len(memo)
        started = clock(device)
        for round, steps in enumerate(rounds):
            if round and client.server_lr:
                before = rounds[round - 1][0]
                key = ("model", cell.federation, before.image_ids, round)
                model = memo.once(key, partial(moved, FedSGDClient(model, client), before))
            known = {name for name, _ in model.named_parameters()}
            wanted = [name for name in names if name in known]
            key = ("update", cell.federation, steps[0].image_ids, round)
            make = partial(make_upload, model, steps, client, names=wanted, round=round, seed=seed)
            models.append(model)
            updates.append(memo.once(key, make))
        is_first = len(memo) > known_before  # of the cells that need these uploads
        seconds = {"gradient": clock(device) - started} if is_first else {}
        return Observation(cell, photographs, plain, first, models, updates, first.labels, seconds)

    def _labels(self, records: Sequence[ImageRecord], images: Tensor) -> Tensor:
        """True labels; for an image without one, the intact model's prediction on that image."""
        labels = torch.tensor([-1 if r.label is None else r.label for r in records])
        if (labels < 0).any():
            labels = torch.where(labels < 0, predict(self.model, images, None), labels)
        return labels


def moved(client: FedSGDClient, inputs: ClientInput) -> LoadedModel:
    """A copy of the client's model after the server's step at the end of this round.

    All clients of a round have the same weights w. The server takes one step along the mean of
    their gradients over every image of the block, w - server_lr * mean gradient; parameters whose
    gradient is withheld stay as they are.
    """
    mean = client.mean_gradient(inputs)
    model = copied(client.model)
    with torch.no_grad():
        for name, gradient in mean.items():
            model.get_parameter(name).sub_(gradient, alpha=client.config.server_lr)
    return model


# the images ---------------------------------------------------------------------------------------

KNOWN_BY = ("image_id", "status", "label", "sha256", "pixel_sha256")


def _known_images(store: RunStore) -> dict[str, dict[Hashable, Any]]:
    """The images of the folder that could be read, by id, with their hashes, and with the label
    that any of its cells has of them: some may be of the time before there were labels."""
    import pandas as pd  # half a second

    cells = [r for r in store.stored_cells() if "pixel_sha256" in store.cell(r).columns]
    if not cells:
        return {}
    rows = pd.concat([store.read(run_id, KNOWN_BY) for run_id in cells])
    rows = rows[(rows["status"] != "unreadable") & rows["pixel_sha256"].fillna("").ne("")]
    rows = rows.sort_values("label", kind="stable", na_position="last")
    rows = rows.drop_duplicates("image_id").set_index("image_id").astype(object)
    by_name = rows.where(rows.notna(), None).to_dict("index")
    return {str(name): of_image for name, of_image in by_name.items()}


def check_labels(records: Sequence[ImageRecord], model: LoadedModel) -> None:
    """Raise unless every label is a class index of the model."""
    classes = model.card.num_classes
    labels = {r.image_id: r.label for r in records if r.label is not None}
    wrong = [name for name, label in labels.items() if not 0 <= label < classes]
    if wrong:
        raise UserError(
            f"Image {wrong[0]} has label {labels[wrong[0]]}, but the model has {classes} "
            f"classes, 0 to {classes - 1} (images with such a label: {len(wrong)}). Give "
            "--labels a CSV with the header file,label, or images whose names and folders tell no "
            "class."
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
