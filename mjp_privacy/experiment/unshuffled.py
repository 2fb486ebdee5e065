"""Uploads of an MJP client in which nothing was shuffled, as the uploads themselves show.

MJP leaves steps unshuffled by its recipe (`plain_share`), or because a mask turned out empty. Such
an upload is that of a plain client, and its picture comes back as a plain client's does: scores
must be read with that in mind. Every masked patch leaves a zero row in the gradient of the position
table, so an upload without such a row masked nothing. No private image is needed to see it.

That holds where a zero row and a mask are the same thing. Noise fills zero rows. Quantisation,
dropped entries and the rounding of weights empty rows that were not masked. Of such uploads
nothing is said.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.equations.names import TABLE
from attacks.equations.patch_system import gradient, located, rounding_error
from attacks.equations.requirements import lacks_gradients, lacks_positions
from mjp_privacy.interfaces import AttackerView, ClientUpdate

FAR = 10.0
"""How many times the rounding of weights every visible row must be. The rows of a trained ViT's
table differ by less from one to the next larger one (2.5 times at most on `cifar_vit`)."""


def shows_no_mask(view: AttackerView, update: ClientUpdate) -> Tensor | None:
    """(n,) 1 for an upload that masked nothing, 0 for one that masked something, NaN for one that
    does not show it; None where no upload of this kind shows it.

    They can show it for one image and one step, where the table's gradient is uploaded and the
    model has the unknown embedding: images and steps with masks of their own hide each other's
    rows.
    """
    if view.model.unk_embed is None or lacks_positions(view.model) is not None:
        return None
    if update.batch > 1 or update.steps > 1 or update.position_noise:
        return None
    if lacks_gradients(view, TABLE) is not None:
        return None
    hidden = located(view, update)
    shown = _rows_stand_apart(view, update, hidden) & ~_altered(update).to(hidden.device)
    return (~hidden.any(-1)).double().where(shown, torch.nan)


def _rows_stand_apart(view: AttackerView, update: ClientUpdate, hidden: Tensor) -> Tensor:
    """(n,) bool: no row is so small that the rounding of weights could have emptied it."""
    longest = gradient(view, update, TABLE)[:, 0, 1:].abs().amax(-1)
    smallest = longest.where(~hidden, torch.inf).amin(-1)
    return smallest.isfinite() & (smallest > FAR * rounding_error(view, update))


def _altered(update: ClientUpdate) -> Tensor:
    """(n,) bool: a defence may have filled or emptied rows of the table's gradient, as far as it
    says; one that says too little may have done anything."""
    altered = torch.zeros(len(update.grads[TABLE]), dtype=torch.bool)
    for errors in (update.noise, update.rounding):
        if TABLE in errors:
            altered |= errors[TABLE].cpu() > 0
    return altered if update.undeclared is None else altered | update.undeclared.cpu()


def unshuffled_uploads(view: AttackerView, gamma: float) -> dict[str, Tensor]:
    """The diagnostic of that name: (m,) how many of the uploads that were read masked nothing; NaN
    for an image with an upload that does not show it.

    Nothing for a client that never shuffles, and where no upload shows it.
    """
    if not gamma:
        return {}
    shown = [shows_no_mask(view, update) for update in view.updates]
    known = [of_upload for of_upload in shown if of_upload is not None]
    if not known or len(known) < len(shown):
        return {}
    return {"unshuffled_uploads": torch.stack(known).sum(0)}
