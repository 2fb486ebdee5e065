"""Recorded uploads as the updates, labels and models that an attacker sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.client.autocast import shown_autocast
from mjp_privacy.client.gradient_labels import HEAD, HEAD_BIAS, label_in_gradient
from mjp_privacy.client.recorded.recorded_upload import RecordedUpload
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.interfaces import ClientUpdate
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.outline import outline_model

UNKNOWN_LABEL = -1


def labels_of(upload: RecordedUpload, model: LoadedModel) -> Tensor:
    """The labels (B,) as recorded, or else as the gradient of the classifier tells them.

    Where that was not sent, or the batch is larger than one, labels are UNKNOWN_LABEL.
    """
    header = upload.header
    if header.labels is not None:
        return torch.tensor(header.labels)
    unknown = torch.full((header.batch,), UNKNOWN_LABEL)
    if header.batch > 1:
        return unknown
    sent = upload.tensors([HEAD, HEAD_BIAS])
    if header.kind == "weight_difference":
        assert header.lr
        before = {name: model.get_parameter(name).detach().to(sent[name]) for name in sent}
        sent = {n: -d / header.lr - header.weight_decay * before[n] for n, d in sent.items()}
    label = label_in_gradient({name: tensor.unsqueeze(0) for name, tensor in sent.items()})
    return unknown if label is None else label


def stacked(
    uploads: Sequence[RecordedUpload], names: Sequence[str], device: torch.device
) -> ClientUpdate:
    """Uploads of one kind of client as one update with a leading axis, on the device.

    It holds those of the names that every upload has. What the uploads share, such as the learning
    rate, is taken from the first one.
    """
    header = uploads[0].header
    parts = [upload.tensors(names) for upload in uploads]
    common = [name for name in names if all(name in part for part in parts)]
    dtype = getattr(torch, header.dtype)
    grads = {name: torch.stack([part[name] for part in parts]).to(device, dtype) for name in common}
    client = header.client_config(uploads[0].name)
    return ClientUpdate(
        grads,
        kind=header.kind,
        dtype=dtype,
        batch=header.batch,
        partners=client.partners,
        round=header.round,
        client=header.client,
        optimizer=header.optimizer,
        lr=header.lr,
        steps=header.steps,
        weight_decay=header.weight_decay,
        dal_lambda=client.dal_lambda if client.dal else 0.0,
        position_noise=client.position_noise,
        momentum=header.momentum,
        autocast=shown_autocast(grads) if header.autocast == "none" else header.autocast,
        noise=_levels([upload.header.noise for upload in uploads], common, device),
        rounding=_levels([upload.header.rounding for upload in uploads], common, device),
        clipped=client.clips,
        undeclared=torch.tensor([upload.header.hides_an_error(client) for upload in uploads])
        if client.defenses
        else None,
    )


def _levels(
    deviations: Sequence[Mapping[str, float]], names: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """Standard deviations (n,) by name; names that are zero in every upload are left out."""
    return {
        name: torch.tensor([each.get(name, 0.0) for each in deviations], dtype=torch.float64).to(
            device
        )
        for name in names
        if any(each.get(name) for each in deviations)
    }


def load_recorded(upload: RecordedUpload) -> LoadedModel:
    """The model whose weights the client started from, as the header describes it."""
    return _plain_vit(load_model(**_model_arguments(upload)), upload)


def outline_recorded(upload: RecordedUpload) -> LoadedModel:
    """The same model without its weights (`models.outline`)."""
    return _plain_vit(outline_model(**_model_arguments(upload)), upload)


def _plain_vit(model: LoadedModel, upload: RecordedUpload) -> LoadedModel:
    """The model; UserError where it is of another family, whose uploads are only simulated."""
    if model.family == "vit":
        return model
    raise UserError(
        f"{shown(upload.weights_path.name)}: expected the weights of a plain ViT, got a "
        f"{model.family}. Uploads of other networks are only simulated: give the weights as a "
        "model of a config."
    )


def _model_arguments(upload: RecordedUpload) -> dict[str, Any]:
    """The arguments of `load_model` that an upload's header states."""
    upload.check_weights()
    header = upload.header
    fields: dict[str, Any] = {"mean": header.mean, "std": header.std, **header.model}
    name = fields.pop("model", None)
    # An absolute path is never taken for a word such as timm:NAME.
    return {"name": name, "checkpoint": upload.weights_path.absolute(), **fields}
