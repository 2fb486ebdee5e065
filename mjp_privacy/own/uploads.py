"""What a user gave, as the uploads that an attacker sees."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from attacks.equations.half_precision import rounding_error
from attacks.equations.names import TABLE
from attacks.masked_span import WEIGHED
from mjp_privacy.client.autocast import Autocast, shown_autocast
from mjp_privacy.client.upload import weights_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Pixels
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.modules import load_module
from mjp_privacy.own.client import ClientStep
from mjp_privacy.own.labels import Labels, given_labels, told_labels
from mjp_privacy.own.reading import Held, read_gradients, separate_uploads

Channels = float | Sequence[float] | None
Models = nn.Module | Sequence[nn.Module]
LabelSource = Literal["given", "read off the gradient", "unknown"]


@dataclass(frozen=True)
class OwnUploads:
    """Uploads of the same images, one after the other, and the model each was made with."""

    models: Sequence[LoadedModel]
    updates: Sequence[ClientUpdate]
    labels: Tensor | None  # (m,)
    label_source: LabelSource
    notes: tuple[str, ...] = ()  # what may be mistaken in what was given

    @property
    def images(self) -> int:
        """The number of images m of all steps."""
        return _steps(self.updates[0].grads) * self.updates[0].batch

    def view(self) -> AttackerView:
        """Everything that an attacker may use."""
        card = self.models[0].card
        pixels = Pixels(card.img_size, card.mean, card.std)
        return AttackerView(self.models[0], self.updates, pixels, self.labels, "plain")


def own_uploads(
    model: Models,
    gradients: Held,
    client: ClientStep,
    *,
    labels: Labels | None = None,
    mean: Channels = None,
    std: Channels = None,
    images: int | None = None,
) -> OwnUploads:
    """Read models and gradients, and the label off the gradient where none is given.

    images  how many there are in all, from which the batch follows; None: `client` has the batch
    """
    held = separate_uploads(gradients)
    modules = _modules(model, len(held))
    loaded = {id(module): _on_cpu(load_module(module, mean=mean, std=std)) for module in modules}
    models = [loaded[id(module)] for module in modules]
    sent = [
        read_gradients(one, module, own)
        for one, module, own in zip(held, modules, models, strict=True)
    ]
    steps = _same_steps(sent)
    if images is not None:
        client = replace(client, batch=_batch(images, steps))
    updates = [
        _update(one, own, client, round)
        for round, (one, own) in enumerate(zip(sent, models, strict=True))
    ]
    images = steps * client.batch
    notes = _notes(updates)
    classes = models[0].card.num_classes
    told, doubt = told_labels(models[0], updates[0])
    if labels is None:
        source: LabelSource = "unknown" if told is None else "read off the gradient"
        return OwnUploads(models, updates, told, source, (*notes, *doubt))
    given = given_labels(labels, images, classes)
    if told is not None and not torch.equal(told, given):
        doubt = (
            f"labels {given.tolist()} were given, and the classifier's gradient says "
            f"{told.tolist()}: residuals are wrong if the given ones are",
        )
    return OwnUploads(models, updates, given, "given", (*notes, *doubt))


def _modules(model: Models, uploads: int) -> list[nn.Module]:
    """The model of each upload."""
    if isinstance(model, nn.Module):
        return [model] * uploads
    modules = list(model) if isinstance(model, Sequence) else []
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise UserError(
            "model: expected a network (torch.nn.Module), or a list of them, got "
            f"{type(model).__name__}. Of a file: load_model(checkpoint=FILE); of a state_dict: the "
            "network that it was taken from."
        )
    if len(modules) != uploads:
        raise UserError(
            f"model: expected one model, or one for each of {uploads} upload(s), got "
            f"{len(modules)}. Give the model as it was before each upload, in the same order."
        )
    return modules


def _on_cpu(model: LoadedModel) -> LoadedModel:
    """The model where the gradients are."""
    on_cpu = model.cls_token.device.type == "cpu"
    return model if on_cpu else copy.deepcopy(model).to("cpu")


def _same_steps(sent: Sequence[Mapping[str, Tensor]]) -> int:
    """The number of independent steps, the same in every upload."""
    steps = {_steps(one) for one in sent}
    if len(steps) > 1:
        raise UserError(
            f"gradients: the uploads hold {', '.join(map(str, sorted(steps)))} independent steps; "
            "expected the same number in each, because they are of the same images."
        )
    return steps.pop()


def _batch(images: int, steps: int) -> int:
    """The number of images in a step, of as many images as labels or pictures were given."""
    if not images or images % steps:
        raise UserError(
            f"labels, images: expected as many for each of {steps} independent step(s), got "
            f"{images} in all. Their first axis counts the images of all steps, in order."
        )
    return images // steps


def _notes(updates: Sequence[ClientUpdate]) -> tuple[str, ...]:
    if TABLE in updates[0].grads:
        return ()
    return (
        f"the gradient of {TABLE} is missing or zero throughout, as of a frozen table: it is "
        "taken as withheld",
    )


def _update(
    sent: Mapping[str, Tensor], model: LoadedModel, client: ClientStep, round: int
) -> ClientUpdate:
    """One upload; numbers of less than 32 bits become float32, with their rounding declared where
    it is large enough to be weighed."""
    if TABLE in sent and not bool(sent[TABLE].any()):  # a frozen table, sent as zeros
        sent = {name: tensor for name, tensor in sent.items() if name != TABLE}
    double = any(tensor.dtype == torch.float64 for tensor in sent.values())
    dtype = torch.float64 if double else torch.float32

    def level(number: float) -> Tensor:
        return torch.full((_steps(sent),), number, dtype=torch.float64)

    rounding = {
        name: (level(client.rounding).square() + half_precision_error(tensor).square()).sqrt()
        for name, tensor in sent.items()
        if client.rounding or torch.finfo(tensor.dtype).bits < 32
    }
    return ClientUpdate(
        {name: tensor.to(dtype) for name, tensor in sent.items()},
        kind=client.kind,
        dtype=dtype,
        batch=client.batch,
        round=round,
        optimizer=client.optimizer,
        lr=client.lr,
        steps=client.steps,
        weight_decay=client.weight_decay,
        momentum=client.momentum,
        autocast=_autocast(sent, client),
        dal_lambda=client.dal_lambda,
        noise={name: level(client.noise) for name in sent} if client.noise else {},
        rounding=rounding,
        weights_before=weights_of(model) if round else None,
    )


def _autocast(sent: Mapping[str, Tensor], client: ClientStep) -> Autocast:
    """The autocast that the user named or, without a name, that a gradient shows."""
    if client.autocast == "none" and client.kind == "gradient":
        return shown_autocast(sent)
    return client.autocast


def _steps(grads: Mapping[str, Tensor]) -> int:
    """The number of independent steps: the length of every tensor's first axis."""
    return len(next(iter(grads.values())))


def half_precision_error(sent: Tensor) -> Tensor:
    """(n,) standard deviation of the rounding of numbers (n, *shape) of less than 32 bits; 0 where
    it is so small that exact equations serve better (float16, but not bfloat16)."""
    kind = torch.finfo(sent.dtype)
    if kind.bits >= 32:
        return torch.zeros(len(sent), dtype=torch.float64)
    error = rounding_error(sent, sent.dtype, kind.tiny)
    size = sent.double().flatten(1).square().mean(1).sqrt()
    return torch.where(error < WEIGHED * size, 0.0, error)
