"""The reconstructions of batches in the order of the private images.

An attack on a batch cannot say which of its pictures is which image. Before they are scored, they
are assigned one to one within each pool (`AttackerView.pool`), and rows say from which place each
reconstruction came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mjp_privacy.interfaces import Reconstruction
from mjp_privacy.metrics.assignment import assigned

PLACE = "matched_place"
"""Diagnostic: the place, from 0, at which the attack returned this image's reconstruction in its
pool."""


def matched(
    answer: Reconstruction, failed: Mapping[int, str], target: Tensor, pool: int
) -> tuple[Reconstruction, dict[int, str]]:
    """The answer and its failures, reordered so that place i belongs to the target's image i."""
    if pool == 1 or answer.images is None:
        return answer, dict(failed)
    images = answer.images.float().cpu()  # as they are stored and scored
    starts = range(0, len(images), pool)
    own = [assigned(images[at : at + pool], target[at : at + pool]) for at in starts]
    order = torch.cat([places + at for places, at in zip(own, starts, strict=True)])
    moved = {int(old): new for new, old in enumerate(order)}
    ordered = replace(
        answer,
        images=answer.images[order.to(answer.images.device)],
        mask=_ordered(answer.mask, order),
        permutation=_ordered(answer.permutation, order),
        diagnostics={
            **{name: values.cpu()[order] for name, values in answer.diagnostics.items()},
            PLACE: torch.cat(own).double(),
        },
        inapplicable={moved[at]: reason for at, reason in answer.inapplicable.items()},
    )
    return ordered, {moved[at]: reason for at, reason in failed.items()}


def _ordered(values: Tensor | None, order: Tensor) -> Tensor | None:
    return None if values is None else values[order.to(values.device)]
