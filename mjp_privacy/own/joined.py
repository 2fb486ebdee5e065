"""Uploads of batches that need not hold the same pictures, as the steps of one round.

Several uploads of one picture are rounds of it. Several uploads of batches may hold other pictures
each, and what they share is for the attack to find out: every upload's pictures get places of their
own, B for the first upload, B for the second, and so on.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attacks.equations.names import PATCH, TABLE, UNKNOWN
from attacks.equations.patch_system import error_of, is_disturbed, patch_system
from attacks.equations.requirements import lacks_gradients, lacks_positions
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Refusal


def joined(view: AttackerView) -> AttackerView | Refusal:
    """The view of R uploads of n steps as one of R n steps, or why they hold no patch system.

    What does not depend on the pictures, such as weight decay, is subtracted with each upload's own
    weights, so that none are needed any more.
    """
    refusal = lacks_positions(view.model) or lacks_gradients(view, TABLE, PATCH)
    if refusal is not None:
        return refusal
    first = view.updates[0]
    grads: dict[str, list[torch.Tensor]] = {TABLE: [], PATCH: []}
    rounding: dict[str, list[torch.Tensor]] = {}
    for update in view.updates:
        system = patch_system(view, update)
        token = system.rows.new_zeros(len(system.rows), 1, system.rows.shape[-1])
        grads[TABLE].append(torch.cat((token, system.rows), 1).unsqueeze(1))
        shape = view.model.patch_embed.proj.weight.shape[1:]
        grads[PATCH].append(system.total.unflatten(2, shape))
        if system.hidden_sum is not None:
            grads.setdefault(UNKNOWN, []).append(system.hidden_sum[:, None, None])
        if is_disturbed(update):
            for name in (TABLE, PATCH):
                rounding.setdefault(name, []).append(error_of(update, name))
    count = len(view.updates)
    update = ClientUpdate(
        {name: torch.cat(parts) for name, parts in grads.items() if len(parts) == count},
        dtype=first.dtype,
        batch=first.batch,
        partners="fresh",
        rounding={name: torch.cat(p) for name, p in rounding.items() if len(p) == count},
    )
    return replace(view, updates=[update], labels=None)
