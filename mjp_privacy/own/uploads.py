"""What a user gave, as the uploads that an attacker sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attacks.equations.patch_system import gradient
from mjp_privacy.client.gradient_labels import HEAD, HEAD_BIAS, label_in_gradient
from mjp_privacy.client.upload import weights_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Pixels
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.modules import load_module
from mjp_privacy.own.client import ClientStep
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

    @property
    def card(self) -> Pixels:
        """The public facts about the pixels."""
        card = self.models[0].card
        return Pixels(card.img_size, card.mean, card.std)

    def view(self) -> AttackerView:
        """Everything that an attacker may use."""
        return AttackerView(self.models[0], self.updates, self.card, self.labels, "plain")


def own_uploads(
    model: Models,
    gradients: Held,
    client: ClientStep,
    *,
    labels: int | Sequence[int] | Tensor | None = None,
    mean: Channels = None,
    std: Channels = None,
) -> OwnUploads:
    """Read models and gradients, and the label off the gradient where none is given."""
    held = separate_uploads(gradients)
    modules = [model] * len(held) if isinstance(model, nn.Module) else list(model)
    if len(modules) != len(held):
        raise UserError(
            f"model: expected one model, or one for each of {len(held)} upload(s), got "
            f"{len(modules)}. Give the model as it was before each upload, in the same order."
        )
    loaded = {id(module): load_module(module, mean=mean, std=std) for module in modules}
    models = [loaded[id(module)] for module in modules]
    updates = [
        _update(read_gradients(one, module, own), own, client, round)
        for round, (one, module, own) in enumerate(zip(held, modules, models, strict=True))
    ]
    steps = {_steps(update.grads) for update in updates}
    if len(steps) > 1:
        raise UserError(
            f"gradients: the uploads hold {', '.join(map(str, sorted(steps)))} independent steps; "
            "expected the same number in each, because they are of the same images."
        )
    images = steps.pop() * client.batch
    if labels is not None:
        return OwnUploads(models, updates, _labels(labels, images), "given")
    told = _told_labels(models[0], updates[0]) if client.batch == 1 else None
    return OwnUploads(models, updates, told, "unknown" if told is None else "read off the gradient")


def _update(
    sent: Mapping[str, Tensor], model: LoadedModel, client: ClientStep, round: int
) -> ClientUpdate:
    """One upload; numbers of less than 32 bits become float32, with their rounding declared."""
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
        dal_lambda=client.dal_lambda,
        noise={name: level(client.noise) for name in sent} if client.noise else {},
        rounding=rounding,
        weights_before=weights_of(model) if round else None,
    )


def _steps(grads: Mapping[str, Tensor]) -> int:
    """The number of independent steps: the length of every tensor's first axis."""
    return len(next(iter(grads.values())))


def half_precision_error(sent: Tensor) -> Tensor:
    """(n,) standard deviation of the rounding of numbers (n, *shape) of less than 32 bits; else 0.

    The error of each entry is uniform over the distance to the next number of its precision.
    """
    kind = torch.finfo(sent.dtype)
    if kind.bits >= 32:
        return torch.zeros(len(sent), dtype=torch.float64)
    size = sent.double().abs().flatten(1)
    power = 2.0 ** (torch.frexp(size).exponent.double() - 1)
    step = torch.where(size == 0, 0.0, kind.eps * power.clamp(min=kind.tiny))
    return (step.square().mean(1) / 12).sqrt()


def _labels(labels: int | Sequence[int] | Tensor, images: int) -> Tensor:
    classes = torch.as_tensor(labels).reshape(-1).cpu()
    if classes.is_floating_point() or len(classes) != images or bool((classes < 0).any()):
        raise UserError(
            f"labels: expected a class index for each of {images} image(s), got {labels!r}. "
            "Give labels=[3] or labels=torch.tensor([3]); batch=… says how many images a step has."
        )
    return classes.long()


def _told_labels(model: LoadedModel, update: ClientUpdate) -> Tensor | None:
    """The labels as the classifier's gradient tells them, or None."""
    view = AttackerView(model, [update], Pixels(0, (), ()))
    names = [name for name in (HEAD, HEAD_BIAS) if name in update.grads]
    if update.kind == "weight_difference" and update.optimizer != "sgd":
        return None
    return label_in_gradient({name: gradient(view, update, name) for name in names})
