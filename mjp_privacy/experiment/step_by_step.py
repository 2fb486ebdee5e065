"""Runs an attack on a block, and step by step if that fails, so that one client step with bad
numbers, or one that an attack of somebody's own does not bear, does not spoil the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attacks.budget import Budget, OverBudget, limited
from mjp_privacy.core.errors import UserError, format_error, format_traceback
from mjp_privacy.core.machine import out_of_memory
from mjp_privacy.core.stop import interrupted
from mjp_privacy.experiment.valid_reconstruction import checked_reconstruction
from mjp_privacy.interfaces import Attack, AttackerView, Reconstruction

BREAKDOWN = (torch.linalg.LinAlgError, np.linalg.LinAlgError)
SECONDS, OVER = "attack_seconds", "over_budget"
"""Diagnostics of images that were attacked with so much time: how much, and whether it ended them.
Which they are depends on the machine."""

Reasons = dict[int, str]
"""{index of an image: why it has no reconstruction, though the attack applies to it}."""


def reconstruct(
    attack: Attack,
    view: AttackerView,
    steps: int,
    generator: Callable[[int], torch.Generator],
    seconds: float | None = None,
    traces: dict[str, str] | None = None,
) -> tuple[Reconstruction, Reasons]:
    """Attack all steps at once or, if that fails, one step after the other.

    generator  gives the generator for the random choices from a step on
    seconds    how long the attack may take over one image (`core.budget`)
    traces     gets the tracebacks of errors, by the reason that rows give
    """
    return _Trial(attack, generator, seconds, {} if traces is None else traces).of(view, steps)


@dataclass(frozen=True)
class _Trial:
    """How an attack is run; see `reconstruct`."""

    attack: Attack
    generator: Callable[[int], torch.Generator]
    seconds: float | None
    traces: dict[str, str]

    def of(self, view: AttackerView, steps: int, first: int = 0) -> tuple[Reconstruction, Reasons]:
        """Attack these steps; the first of them has the number `first`."""
        batch = view.updates[0].batch
        divisible = steps > 1 and view.pool == batch
        together = batch if divisible else steps * batch
        try:
            reconstruction = self._run(first, view, steps * batch)
        except OverBudget as error:
            if divisible:
                return self._one_by_one(view, steps)
            late = dict.fromkeys(range(together), str(error))
            return Reconstruction(None, inapplicable=late), {}
        except (Exception, SystemExit, GeneratorExit) as error:  # the attack's own sys.exit() too
            if interrupted() or out_of_memory(error):
                raise
            if divisible:
                return self._one_by_one(view, steps)
            return Reconstruction(None), dict.fromkeys(range(together), self._reason(error))
        return reconstruction, without_reconstruction(reconstruction, steps * batch)

    def _run(self, first: int, view: AttackerView, count: int) -> Reconstruction:
        """The attack's answer, checked; with the time that it had, where that is limited."""
        budget: Budget | None
        with nullcontext() if self.seconds is None else limited(self.seconds, count) as budget:
            answer = self.attack.run(view, generator=self.generator(first))
        reconstruction = checked_reconstruction(answer, view, count)
        if budget is None:
            return reconstruction
        cut = [place in budget.cut for place in range(count)]
        facts = {
            SECONDS: torch.full((count,), budget.seconds, dtype=torch.float64),
            OVER: torch.tensor(cut, dtype=torch.float64),
        }
        return replace(reconstruction, diagnostics={**reconstruction.diagnostics, **facts})

    def _one_by_one(self, view: AttackerView, steps: int) -> tuple[Reconstruction, Reasons]:
        batch, size = view.updates[0].batch, view.pixels.size
        parts: list[Reconstruction] = []
        reasons: Reasons = {}
        pictures = False
        for step in range(steps):
            part, failed = self.of(view.part(step), 1, step)
            pictures |= part.images is not None
            if part.images is None:
                lost = torch.full((batch, len(view.pixels.mean), size, size), torch.nan)
                part = replace(part, images=lost)
            parts.append(part)
            reasons |= {step * batch + place: reason for place, reason in failed.items()}
        whole = joined(parts)
        only_masks = whole.mask is not None and not pictures
        return replace(whole, images=None) if only_masks else whole, reasons

    def _reason(self, error: BaseException) -> str:
        """Why the images of a step have no reconstruction, as their rows say it."""
        if isinstance(error, UserError):
            return str(error)
        if isinstance(error, BREAKDOWN):
            return f"the attack's linear algebra broke down: {error}"
        reason = format_error(error)
        self.traces.setdefault(reason, format_traceback(error))
        return reason


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
