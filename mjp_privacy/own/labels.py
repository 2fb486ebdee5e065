"""The labels of a step: as its user gives them, and as the classifier's gradient tells them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.equations.patch_system import gradient
from mjp_privacy.client.gradient_labels import HEAD, HEAD_BIAS, label_in_gradient
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Pixels
from mjp_privacy.models import LoadedModel
from mjp_privacy.own.client import said

Labels = int | Sequence[int] | Tensor
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SEVERAL = 0.2  # share of the strongest class's gradient from which another one's counts as such


def given_labels(labels: Labels, images: int, classes: int) -> Tensor:
    """The labels (m,) that a user gave, or a UserError."""
    given = _flat(labels)
    if len(given) != images or int(given.min()) < 0 or int(given.max()) >= max(classes, 1):
        example = list(range(min(images, 4)))
        raise UserError(
            f"labels: expected a class index from 0 to {classes - 1} for each of {images} "
            f"image(s), got {said(labels)}. Give labels={example}; batch=… says how many images a "
            "step has."
        )
    return given.long()


def number_of(labels: Labels) -> int:
    """How many labels these are."""
    return len(_flat(labels))


def _flat(labels: Labels) -> Tensor:
    """(m,) whole numbers; a UserError for anything else."""
    try:
        given = torch.as_tensor(labels).reshape(-1).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _no_labels(labels) from error  # torch's, for text and ragged lists
    if given.dtype not in WHOLE:
        raise _no_labels(labels)
    return given


def _no_labels(labels: Labels) -> UserError:
    return UserError(
        f"labels: expected class indices, got {said(labels)}. Give labels=[3], or a tensor of "
        "whole numbers with one for each image."
    )


def told_labels(model: LoadedModel, update: ClientUpdate) -> tuple[Tensor | None, tuple[str, ...]]:
    """The labels as the classifier's gradient tells them, or None; and why they are doubtful."""
    names = [name for name in (HEAD, HEAD_BIAS) if name in update.grads]
    if update.batch > 1 or (update.kind == "weight_difference" and update.optimizer != "sgd"):
        return None, ()
    view = AttackerView(model, [update], Pixels(0, (), ()))  # pixels are not looked at
    grads = {name: gradient(view, update, name) for name in names}
    label = label_in_gradient(grads)
    if HEAD_BIAS in grads and not update.noise:
        bias = grads[HEAD_BIAS]
        strongest = bias.amin(-1, keepdim=True)
        several = int(((bias < SEVERAL * strongest) & (strongest < 0)).sum(-1).max())
        if several > 1:
            return None, (
                f"the classifier's gradient points to at least {several} classes, and that of one "
                "picture to one: this looks like a batch (give batch=…) or mixup",
            )
    return label, ()
