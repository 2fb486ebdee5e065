"""A check of a reconstruction that needs no truth: does it have the gradient that was uploaded?

    residual = || g(x) - g || / || g ||,   g = dL/dW of the patch embedding

g is the upload's. g(x) is the gradient on the reconstruction x, computed like the client's, with
the weights, labels and precision of the round. Its mask is the attack's estimate or, if it has
none, the rows where `pos_embed.grad` is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from attacks.equations.names import PATCH as RESIDUAL_OVER
from attacks.equations.names import TABLE
from attacks.equations.patch_system import gradient, located
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel

Mode = Literal["eval", "train"]


def gradient_residual(
    view: AttackerView,
    images: Tensor,
    mask: Tensor | None,
    models: Sequence[LoadedModel],
    mode: Mode = "eval",
) -> Tensor | None:
    """(m,) residual of each image's step, averaged over the uploads.

    None if the labels or the gradient are not known, and for batches: the order of a batch's
    pictures means nothing, so that nobody knows which label is whose.
    images  (m, C, H, W) in [0, 1], the reconstruction
    mask    (m, N), the attack's estimate for the first upload, or None
    models  those that the client trained, one for each upload
    """
    if view.labels is None or not view.updates:
        return None
    if any(RESIDUAL_OVER not in u.grads or u.batch > 1 for u in view.updates):
        return None
    images = images.nan_to_num(0.5)  # an image with NaN counts as failed; its value is not used
    ids = tuple(map(str, range(len(images))))
    residuals = []
    for model, update in zip(models, view.updates, strict=True):
        hidden = (
            mask if mask is not None and update is view.updates[0] else masked_rows(view, update)
        )
        client = FedSGDClient(model, _config(mode, update))
        inputs = ClientInput(images, view.labels, ids, hidden)
        computed = client.gradients(inputs, names=[RESIDUAL_OVER])[RESIDUAL_OVER]
        uploaded = gradient(view, update, RESIDUAL_OVER)
        difference = (computed - uploaded).double().flatten(1).norm(dim=1)
        residuals.append(difference / uploaded.double().flatten(1).norm(dim=1))
    return torch.stack(residuals).mean(0).cpu()


def _config(mode: Mode, update: ClientUpdate) -> ClientConfig:
    """What decides the bits of the client's gradient."""
    return ClientConfig(mode=mode, autocast=update.autocast)


def masked_rows(view: AttackerView, update: ClientUpdate) -> Tensor | None:
    """(m, N) positions that an upload of single images shows to be masked; None if the position
    table's gradient was not uploaded."""
    if TABLE not in update.grads:
        return None
    return located(view, update)
