"""Recorded uploads: read from the files of any federation that wrote down what its clients sent.

One of the two kinds of `source`. The uploads' headers say which models, settings and clients there
were; a config only names the attacks. Nothing that a client computed is computed again. If the
private images were not recorded, the rows are `unscored`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import clock
from mjp_privacy.core.schema import height_width
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.config import Cell, Experiment, GridEntry, ModelConfig
from mjp_privacy.experiment.simulated import preprocessing
from mjp_privacy.experiment.source import (
    ImageNote,
    ModelUploads,
    ModelVariants,
    Observation,
    UploadSource,
    lacking,
)
from mjp_privacy.experiment.store import NoRun, RunStore
from mjp_privacy.interfaces import ClientInput, Control, Refusal
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import shuffle_patches
from mjp_privacy.uploads.folder import REFUSED, Group, group_uploads
from mjp_privacy.uploads.memory import UNKNOWN_LABEL, labels_of, stacked
from mjp_privacy.uploads.record import Upload

NAMED = 3  # refused uploads that a message names


class Recorded(UploadSource):
    """The source that reads a folder of uploads; each group makes a line of the table.

    uploads  those whose headers can be read, refused ones among them: all name the lines
    refused  uploads that cannot be attacked, with the reason. They make a line of failed rows
    limit    number of images for each line; at least one step of a client is read
    """

    labels = "as recorded"
    recorded = True

    def __init__(
        self,
        folder: Path,
        uploads: Sequence[Upload],
        device: torch.device,
        refused: Mapping[str, str],
        limit: int | None,
    ) -> None:
        super().__init__(device)
        self.groups = {group.name: group for group in group_uploads(uploads, limit, refused)}
        self.refused = refused
        self.data = folder.resolve().name
        # a digest of the folder's path: other folders are called `uploads`, too
        self.place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]

    def experiment(self, experiment: Experiment) -> Experiment:
        """The experiment with its attacks, on the models, settings and clients of these uploads;
        refused ones are its last line."""
        entries, models = [], {}
        for name, group in self.groups.items():
            header, weights = group.header, group.series[0].first.weights_path
            models[name] = ModelConfig(checkpoint=str(weights))
            entries.append(
                GridEntry(
                    (name,),
                    ("c" if header.gamma > 0 else "a",),
                    (header.gamma,),
                    client=vars(header.recipe),
                    dtypes=(header.dtype,),
                )
            )
        if self.refused:
            models[REFUSED] = ModelConfig()
            entries.append(GridEntry((REFUSED,), ("a",), dtypes=("float32",)))
        groups = list(self.groups.values())
        batches = math.lcm(*(group.header.recipe.batch for group in groups))
        pools = [len(g.records) for g in groups if g.series[0].first.shuffles_images]
        block = max([experiment.block, *pools])
        return replace(
            experiment,
            models=models,
            grid=tuple(entries),
            dtypes=tuple(dict.fromkeys(group.header.dtype for group in groups)),
            block=-(-block // batches) * batches,
            images=None,
            classes=None,
            data_is_papers=False,
        )

    def group(self, model: str) -> Group:
        """The uploads of a line; raises for the line of those that were refused."""
        if model == REFUSED:
            named = first_of(list(self.refused), NAMED)
            raise UserError(f"{len(self.refused)} refused: {named}. Their rows say why")
        return self.groups[model]

    def reasons(self, model: str) -> Mapping[str, str]:
        return self.refused if model == REFUSED else {}

    def records(self, model: str) -> Sequence[ImageRecord]:
        """The images of this group's uploads; for a refused upload a record that stands for it."""
        if model == REFUSED:
            return [ImageRecord(name, None, "none") for name in self.refused]
        return self.groups[model].records

    def columns(self, model: str) -> Mapping[str, Any]:
        if model == REFUSED:
            return {}
        header = self.groups[model].header
        return {"round": header.round, "client_label": header.label}

    def open(self, model: str) -> RecordedUploads:
        """Load the group's model. Its card also names the uploads, because notes of a card are part
        of a run_id: other uploads of the same model get rows of their own."""
        group = self.group(model)
        loaded = load_group(group)
        report = loaded.card.checkpoint
        notes = (*report.notes, _content(group))
        loaded.card = replace(loaded.card, checkpoint=replace(report, notes=notes))
        return RecordedUploads(group, ModelVariants(loaded, self.device))

    def outline(self, model: str) -> LoadedModel:
        return self.group(model).series[0].first.outline()

    def check(self, store: RunStore) -> list[str]:
        """Raise where the run holds lines of another folder of this name, which these would
        replace; a folder that was moved since has the same uploads. No images are looked for: the
        groups' digests are part of their run_ids."""
        with suppress(NoRun):
            for line in store.read_cells():
                if line.get("data") != self.data or line.get("data_place") in (None, self.place):
                    continue
                group = self.groups.get(str(line["model"]))
                if group is None or _content(group) not in (line.get("notes") or ()):
                    raise UserError(
                        f"{shown(store.root)} holds {shown(str(line['model']))} and other lines of "
                        f"another folder that is called {shown(self.data)} too, and they would be "
                        "replaced. Give another --out, or this folder of uploads another name."
                    )
        return []


def _content(group: Group) -> str:
    """What a line says of the uploads that it was made of."""
    return f"{len(group.series)} recorded upload series, sha256 {group.digest()[:12]}"


def load_group(group: Group) -> LoadedModel:
    """The model of a group's first round; a UserError if it cannot be attacked with."""
    loaded = group.series[0].first.model()
    preprocessing(loaded)  # raises if the header's way of preparing images is impossible
    return loaded


class RecordedUploads(ModelUploads):
    """One group's uploads, and the models they were computed with."""

    declared = True

    def __init__(self, group: Group, variants: ModelVariants) -> None:
        super().__init__(variants)
        self.group, self.scored = group, group.scored
        self._later: dict[tuple[str, str], LoadedModel] = {}
        """The models of later rounds that were loaded so far, by file of weights and precision."""

    def read(self, records: Sequence[ImageRecord]) -> None:
        """Read the private images; one that was not recorded is NaN everywhere."""
        size = height_width(self.model.card.img_size)
        for series in self.group.of(records):
            truth, reason = None, ""
            try:
                truth = series.first.truth()
            except UserError as error:  # its file changed since the folder was examined
                reason = str(error)
            for place, record in enumerate(series.records):
                blank = torch.full((3, *size), torch.nan)
                image = blank if truth is None else truth.images[place]
                self.images[record] = image
                pixels = hashlib.sha256(image.numpy().tobytes()).hexdigest()
                self.notes.append(ImageNote(record, "", pixels, reason))

    def at(self, upload: Upload, dtype: str) -> LoadedModel:
        """The model that this upload was computed with, in the given precision."""
        weights_file = upload.header.weights
        if weights_file == self.group.header.weights:
            return self.variants.of("intact", dtype)
        if (weights_file, dtype) not in self._later:
            loaded = upload.model().to(self.model.like.device).to(getattr(torch, dtype))
            self._later[weights_file, dtype] = loaded
        return self._later[weights_file, dtype]

    def lacks(self, cell: Cell, records: Sequence[ImageRecord]) -> Refusal | None:
        if isinstance(cell.attacker, Control):
            return None
        return lacking(self.group.of(records), cell.attacker, self.model)

    def observe(
        self, cell: Cell, names: Sequence[str], records: Sequence[ImageRecord]
    ) -> Observation:
        """Read the uploads of these images, as many rounds as the attack needs. What a client fed
        in later steps than its first is not recorded, and nothing here needs it."""
        images = torch.stack([self.images[record] for record in records])
        ids = tuple(record.image_id for record in records)
        series = self.group.of(records)
        labels = torch.cat([labels_of(s.first, self.at(s.first, "float32")) for s in series])
        known = None if (labels == UNKNOWN_LABEL).any() else labels
        truths = [s.first.truth() for s in series]
        masks = [t.mask for t in truths if t is not None and t.mask is not None]
        orders = [t.permutation for t in truths if t is not None and t.permutation is not None]
        inputs = ClientInput(images, labels, ids)
        if self.scored and len(masks) == len(orders) == len(series):
            mask, permutation = torch.cat(masks), torch.cat(orders)
            shuffled = shuffle_patches(images, permutation, self.model.patch_size)
            inputs = ClientInput(shuffled, labels, ids, mask, permutation)
        if not cell.uploads:
            return Observation(cell, images, images, inputs, [self.model], [], known)
        device = self.model.like.device
        rounds = series[0].uploads[: cell.uploads]
        models = [self.at(upload, cell.dtype) for upload in rounds]
        started = clock(device)
        updates = []
        for round in range(len(rounds)):
            updates.append(stacked([s.uploads[round] for s in series], names, device))
        seconds = {"read": clock(device) - started}
        return Observation(cell, images, images, inputs, models, updates, known, seconds)
