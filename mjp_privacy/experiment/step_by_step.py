"""Runs an attack on a block, and step by step if that breaks down, so that one client step with bad
numbers does not spoil the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mjp_privacy.interfaces import Attack, AttackerView, Reconstruction

BREAKDOWN = (torch.linalg.LinAlgError, np.linalg.LinAlgError)

Reasons = dict[int, str]
"""{index of an image: why it has no reconstruction, though the attack applies to it}."""


def reconstruct(
    attack: Attack, view: AttackerView, steps: int, generator: Callable[[int], torch.Generator]
) -> tuple[Reconstruction, Reasons]:
    """Attack all steps at once or, if linear algebra breaks down there, one step after the other.

    generator: gives the generator for the random choices from a step on.
    """
    batch = view.updates[0].batch
    try:
        reconstruction = attack.run(view, generator=generator(0))
    except BREAKDOWN as error:
        if steps == 1:
            reason = f"the attack's linear algebra broke down: {error}"
            return Reconstruction(None), dict.fromkeys(range(batch), reason)
        return _one_by_one(attack, view, steps, generator)
    return reconstruction, without_reconstruction(reconstruction, steps * batch)


def _one_by_one(
    attack: Attack, view: AttackerView, steps: int, generator: Callable[[int], torch.Generator]
) -> tuple[Reconstruction, Reasons]:
    batch, size = view.updates[0].batch, view.pixels.size
    parts: list[Reconstruction] = []
    reasons: Reasons = {}
    for step in range(steps):
        part, failed = reconstruct(attack, view.part(step), 1, lambda _, at=step: generator(at))  # type: ignore[misc]
        if part.images is None:
            lost = torch.full((batch, len(view.pixels.mean), size, size), torch.nan)
            part = replace(part, images=lost)
        parts.append(part)
        reasons |= {step * batch + place: reason for place, reason in failed.items()}
    return joined(parts), reasons


def without_reconstruction(reconstruction: Reconstruction, count: int) -> Reasons:
    """Which of `count` images have no finite reconstruction, though the attack applies to them."""
    wanted = [at for at in range(count) if at not in reconstruction.inapplicable]
    if reconstruction.images is None and reconstruction.mask is not None:
        return {}  # an attack that only names the masked positions
    if reconstruction.images is None:
        return dict.fromkeys(wanted, "the attack returned no reconstruction")
    finite = reconstruction.images.isfinite().flatten(1).all(-1).tolist()
    return {at: "the reconstruction is not finite" for at in wanted if not finite[at]}


def joined(parts: Sequence[Reconstruction]) -> Reconstruction:
    """The reconstructions of successive steps as one; all of them hold images.

    What one part has and another lacks is filled in there. A part that lacks something broke down,
    so its images are failures and the filling is never read.
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
    """The parts as one tensor (m, ...), a missing part filled with `missing`; None if all miss."""
    example = next((part for part in parts if part is not None), None)
    if example is None:
        return None
    filled = [
        example.new_full((count, *example.shape[1:]), missing) if part is None else part
        for part, count in zip(parts, counts, strict=True)
    ]
    return torch.cat([part.cpu() for part in filled])
