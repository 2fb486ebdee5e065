"""A workbench whose uploads were recorded: nothing is computed that a client computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mjp_privacy.client_config import ClientConfig
from mjp_privacy.config import Cell, Experiment
from mjp_privacy.data import ImageRecord
from mjp_privacy.errors import UserError
from mjp_privacy.interfaces import Attack, ClientInput, ClientUpdate
from mjp_privacy.models import Victim, load_model
from mjp_privacy.models.jigsaw import shuffle_patches
from mjp_privacy.parsing import parse
from mjp_privacy.uploads.folder import RecordedUpload
from mjp_privacy.uploads.groups import Group
from mjp_privacy.workbench import Workbench

HEAD_BIAS = "head.bias"
UNKNOWN_LABEL = -1


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


def labels_of(upload: RecordedUpload, model: Victim) -> Tensor:
    """(B,) as recorded; else, of one image, the class whose bias alone is pushed up."""
    if upload.header.labels is not None:
        return torch.tensor(upload.header.labels)
    bias = upload.tensors([HEAD_BIAS]).get(HEAD_BIAS)
    if bias is None or upload.header.batch > 1:
        return torch.full((upload.header.batch,), UNKNOWN_LABEL)
    if upload.header.kind == "weight_difference":
        assert upload.header.lr
        before = model.get_parameter(HEAD_BIAS).detach().to(bias)
        bias = -bias / upload.header.lr - upload.header.weight_decay * before
    return bias.argmin().view(1)


def stacked(
    uploads: Sequence[RecordedUpload], names: Sequence[str], device: torch.device
) -> ClientUpdate:
    """Uploads of one kind of client with a leading axis, of the names that all of them hold; what
    is one for all, such as the learning rate, is the first one's."""
    header = uploads[0].header
    parts = [upload.tensors(names) for upload in uploads]
    common = [name for name in names if all(name in part for part in parts)]
    dtype = getattr(torch, header.dtype)
    grads = {name: torch.stack([part[name] for part in parts]).to(device, dtype) for name in common}
    client = parse(ClientConfig, header.recipe, f"{uploads[0].name}, recipe", {})
    return ClientUpdate(
        grads,
        kind=header.kind,
        dtype=dtype,
        batch=header.batch,
        round=header.round,
        client=header.client,
        optimizer=header.optimizer,
        lr=header.lr,
        steps=header.steps,
        weight_decay=header.weight_decay,
        dal_lambda=client.dal_lambda if client.dal else 0.0,
        position_noise=client.position_noise,
        momentum=header.momentum,
        noise=_levels([upload.header.noise for upload in uploads], common, device),
        rounding=_levels([upload.header.rounding for upload in uploads], common, device),
        clipped=client.clips,
    )


def _levels(
    told: Sequence[Mapping[str, float]], names: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """(n,) by name; of names that no upload speaks of nothing."""
    return {
        name: torch.tensor([one.get(name, 0.0) for one in told], dtype=torch.float64).to(device)
        for name in names
        if any(one.get(name) for one in told)
    }


def load_recorded(upload: RecordedUpload) -> Victim:
    """The model whose weights the client started from, as the header describes it."""
    header = upload.header
    if not upload.weights_path.is_file():
        raise UserError(
            f"{upload.name}.json, weights: expected a file beside the uploads, got "
            f"{header.weights!r}, which is not there. Put the weights before the round there."
        )
    fields = {"mean": header.mean, "std": header.std, **header.model}
    name = fields.pop("model", None)
    return load_model(name, checkpoint=upload.weights_path, **fields)
