"""One client step of a block taken out, and the reconstructions of the steps put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mjp_privacy.interfaces import AttackerView, Reconstruction


def step_alone(view: AttackerView, step: int) -> AttackerView:
    """What the attacker sees of one client step."""
    batch = view.updates[0].batch
    updates = [
        replace(
            update,
            grads=_sliced(update.grads, step),
            noise=_sliced(update.noise, step),
            rounding=_sliced(update.rounding, step),
        )
        for update in view.updates
    ]
    labels = None if view.labels is None else view.labels[step * batch : (step + 1) * batch]
    return replace(view, updates=updates, labels=labels)


def _sliced(tensors: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    return {name: tensor[step : step + 1] for name, tensor in tensors.items()}


def joined(parts: Sequence[Reconstruction]) -> Reconstruction:
    """Reconstructions of successive images as one.

    All hold images; a part that lacks what another one has broke down, and what is filled in for it
    is not read.
    """
    counts = [len(part.images) for part in parts if part.images is not None]
    starts = [sum(counts[:at]) for at in range(len(counts))]
    names = dict.fromkeys(name for part in parts for name in part.diagnostics)
    diagnostics = {
        name: _joined([part.diagnostics.get(name) for part in parts], counts, torch.nan)
        for name in names
    }
    return Reconstruction(
        _joined([part.images for part in parts], counts, torch.nan),
        _joined([part.mask for part in parts], counts, False),
        _joined([part.permutation for part in parts], counts, 0),
        {name: values for name, values in diagnostics.items() if values is not None},
        {
            start + place: reason
            for start, part in zip(starts, parts, strict=True)
            for place, reason in part.inapplicable.items()
        },
    )


def _joined(parts: Sequence[Tensor | None], counts: Sequence[int], missing: float) -> Tensor | None:
    """(m, ...), `missing` where a part has none; None if none has."""
    given = next((part for part in parts if part is not None), None)
    if given is None:
        return None
    filled = [
        given.new_full((count, *given.shape[1:]), missing) if part is None else part
        for part, count in zip(parts, counts, strict=True)
    ]
    return torch.cat([part.cpu() for part in filled])
