"""An attack on each client step of a block alone, so that one whose numbers break down does not
take the others along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mjp_privacy.interfaces import Attack, AttackerView, Reconstruction

BREAKDOWN = (torch.linalg.LinAlgError, np.linalg.LinAlgError)

Reasons = dict[int, str]
"""Why images have no reconstruction and should, by their place."""


def reconstruct(
    attack: Attack, view: AttackerView, steps: int, generator: Callable[[int], torch.Generator]
) -> tuple[Reconstruction, Reasons]:
    """The reconstruction of all steps at once or, where the linear algebra of that breaks down, of
    one step after the other. generator: of the random choices from this step on."""
    batch = view.updates[0].batch
    try:
        made = attack.run(view, generator=generator(0))
    except BREAKDOWN as error:
        if steps == 1:
            reason = f"the attack's linear algebra broke down: {error}"
            return Reconstruction(None), dict.fromkeys(range(batch), reason)
        return _one_by_one(attack, view, steps, generator)
    return made, without_reconstruction(made, steps * batch)


def _one_by_one(
    attack: Attack, view: AttackerView, steps: int, generator: Callable[[int], torch.Generator]
) -> tuple[Reconstruction, Reasons]:
    batch, size = view.updates[0].batch, view.pixels.size
    parts: list[Reconstruction] = []
    reasons: Reasons = {}
    for step in range(steps):
        made, why = reconstruct(attack, view.part(step), 1, lambda _, at=step: generator(at))  # type: ignore[misc]
        if made.images is None:
            lost = torch.full((batch, len(view.pixels.mean), size, size), torch.nan)
            made = replace(made, images=lost)
        parts.append(made)
        reasons |= {step * batch + place: reason for place, reason in why.items()}
    return joined(parts), reasons


def without_reconstruction(made: Reconstruction, count: int) -> Reasons:
    """Which of `count` images have no finite reconstruction and should."""
    wanted = [at for at in range(count) if at not in made.inapplicable]
    if made.images is None and made.mask is not None:
        return {}  # it names the mask and makes no picture
    if made.images is None:
        return dict.fromkeys(wanted, "the attack returned no reconstruction")
    finite = made.images.isfinite().flatten(1).all(-1).tolist()
    return {at: "the reconstruction is not finite" for at in wanted if not finite[at]}


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
