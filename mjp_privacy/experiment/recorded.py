"""A workbench whose uploads were recorded: nothing is computed that a client computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mjp_privacy.client.recorded.folder import RecordedUpload
from mjp_privacy.client.recorded.groups import Group
from mjp_privacy.client.recorded.loading import UNKNOWN_LABEL, labels_of, load_recorded, stacked
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.config import Cell, Experiment
from mjp_privacy.experiment.simulated import Workbench
from mjp_privacy.interfaces import Attack, ClientInput, ClientUpdate
from mjp_privacy.models import Victim
from mjp_privacy.models.jigsaw import shuffle_patches


class RecordedBench(Workbench):
    """One group's model and its uploads."""

    def __init__(
        self, model: Victim, experiment: Experiment, device: torch.device, group: Group
    ) -> None:
        super().__init__(model, experiment, device)
        self.group = group
        self.has_truth = group.scored
        self._weights: dict[str, Victim] = {group.weights: model}

    def lacks(self, attack: Attack, records: Sequence[ImageRecord]) -> str | None:
        if attack.victim == "april_block" and self.model.first_block != "closed_form":
            return (
                "it needs a client whose block 0 has neither norm1 nor residuals; this one trained "
                "the intact model"
            )
        fewest = min(len(series.uploads) for series in self.group.of(records))
        if fewest < attack.uploads:
            return f"it needs {attack.uploads} uploads of the same images; {fewest} are recorded"
        return None

    def victim(self, kind: str, dtype: str, positions: str = "own") -> Victim:
        """The recorded model; another one only to say how right the altered model would be."""
        if kind == "april_block" and self.model.first_block == "closed_form":
            kind = "intact"
        return super().victim(kind, dtype)

    def photographs(
        self, cell: Cell, records: Sequence[ImageRecord], images: Tensor, round: int = 0
    ) -> Tensor:
        return images

    def inputs(
        self, cell: Cell, records: Sequence[ImageRecord], images: Tensor, round: int = 0
    ) -> ClientInput:
        uploads = self._uploads(records, round)
        ids = tuple(record.image_id for record in records)
        labels = torch.cat([labels_of(upload, self._loaded(upload)) for upload in uploads])
        truths = [upload.truth() for upload in uploads]
        masks = [t.mask for t in truths if t is not None and t.mask is not None]
        orders = [t.permutation for t in truths if t is not None and t.permutation is not None]
        if not self.has_truth or len(masks) < len(uploads) or len(orders) < len(uploads):
            return ClientInput(images, labels, ids)
        mask, permutation = torch.cat(masks), torch.cat(orders)
        fed = shuffle_patches(images, permutation, self.model.patch_size)
        return ClientInput(fed, labels, ids, mask, permutation)

    def steps(
        self, cell: Cell, records: Sequence[ImageRecord], images: Tensor, round: int
    ) -> list[ClientInput]:
        """Of the later local steps nothing is recorded, and nobody needs it."""
        return [self.inputs(cell, records, images, round)]

    def known_labels(self, inputs: ClientInput) -> Tensor | None:
        return None if (inputs.labels == UNKNOWN_LABEL).any() else inputs.labels

    def models(
        self,
        cell: Cell,
        attack: Attack,
        rounds: Sequence[ClientInput],
        seconds: dict[str, float],
    ) -> list[Victim]:
        """The model of each round, which the uploads of that round share."""
        first = self.group.of(self._by_id(rounds[0].image_ids))[0]
        return [
            self._loaded(upload).to(getattr(torch, cell.dtype))
            for upload in first.uploads[: len(rounds)]
        ]

    def _loaded(self, upload: RecordedUpload) -> Victim:
        place = upload.header.weights
        if place not in self._weights:
            self._weights[place] = load_recorded(upload).to(self.device)
        return self._weights[place]

    def updates(
        self,
        cell: Cell,
        attack: Attack,
        needs: Sequence[str],
        rounds: Sequence[Sequence[ClientInput]],
        models: Sequence[Victim],
        seconds: dict[str, float],
    ) -> list[ClientUpdate]:
        series = self.group.of(self._by_id(rounds[0][0].image_ids))
        started = self.clock()
        found = []
        for place, model in enumerate(models):
            uploads = [one.uploads[place] for one in series]
            weights = {name: p.detach() for name, p in model.named_parameters()}
            update = stacked(uploads, needs, self.device)
            found.append(replace(update, weights_before=weights if place else None))
        seconds["read"] = self.clock() - started
        return found

    def _uploads(self, records: Sequence[ImageRecord], round: int) -> list[RecordedUpload]:
        return [one.uploads[round] for one in self.group.of(records)]

    def _by_id(self, image_ids: Sequence[str]) -> list[ImageRecord]:
        return [ImageRecord(image_id) for image_id in image_ids]
