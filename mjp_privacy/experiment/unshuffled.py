"""Uploads of an MJP client in which nothing was shuffled, as the uploads themselves show.

MJP leaves steps unshuffled by its recipe (`plain_share`), or because a mask turned out empty. Such
an upload is that of a plain client, and its picture comes back as a plain client's does: scores
must be read with that in mind. Every masked patch leaves a zero row in the gradient of the position
table, so an upload without such a row masked nothing. No private image is needed to see it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.equations.names import TABLE
from attacks.equations.patch_system import located
from attacks.equations.requirements import lacks_gradients, lacks_positions
from mjp_privacy.interfaces import AttackerView, ClientUpdate


def shows_no_mask(view: AttackerView, update: ClientUpdate) -> Tensor | None:
    """(n,) bool: which uploads masked nothing; None where the upload does not show it.

    It shows it for one image and one step, where the table's gradient is uploaded and the model has
    the unknown embedding: images and steps with masks of their own hide each other's rows.
    """
    if view.model.unk_embed is None or lacks_positions(view.model) is not None:
        return None
    if update.batch > 1 or update.steps > 1 or lacks_gradients(view, TABLE) is not None:
        return None
    return ~located(view, update).any(-1)


def unshuffled_uploads(view: AttackerView, gamma: float) -> dict[str, Tensor]:
    """The diagnostic of that name: (m,) how many of the uploads that were read masked nothing.

    Nothing for a client that never shuffles, and where an upload does not show it.
    """
    if not gamma:
        return {}
    shown = [shows_no_mask(view, update) for update in view.updates]
    known = [of_upload for of_upload in shown if of_upload is not None]
    if not known or len(known) < len(shown):
        return {}
    return {"unshuffled_uploads": torch.stack(known).sum(0).double()}
