"""Measures the error that a defence makes on a planted upload against the one that it declares.

Attacks take the declared size for the truth. What is made and not declared makes a client look
safer than it is, because they trust an upload that they should weigh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mjp_privacy.client.defenses.disturbance import Disturbed
from mjp_privacy.client.defenses.registry import StepDefense, UploadDefense
from mjp_privacy.interfaces import Grads
from tests.contract.defense_targets import ON_REAL_GRADIENTS
from tests.contract.planted_uploads import REAL_UPLOAD, PlantedUpload

BOUND = 1.4
"""The error may be this many times the declared one. Of the defences here `sign` comes nearest,
with 1.38 on the heavy-tailed upload, for it declares what normal entries would give; the others end
at 1.13 or below. A declaration of half the size fails for each of them. On a trained ViT's gradient
`defense_targets.ON_REAL_GRADIENTS` goes before it."""
CHANCE = 4.0
"""Standard deviations by which the error of a tensor with few entries may exceed that by chance."""
DRAWS = 32  # of a step's noise, whose mean is the gradient as it was clipped


def deviation(error: Tensor) -> Tensor:
    """Root mean square (n,) of (n, ...)."""
    return error.double().flatten(1).square().mean(1).sqrt()


def declared(altered: Disturbed, name: str) -> Tensor:
    """What is declared (n,) of noise and rounding together."""
    nothing = torch.zeros(len(altered.sent[name]), dtype=torch.float64)
    parts = (each.get(name, nothing).double() for each in (altered.noise, altered.rounding))
    return torch.stack([part.square() for part in parts]).sum(0).sqrt()


def allowance(entries: int, bound: float = BOUND) -> float:
    """The bound, and what chance adds for so few entries: allowance(10**6) is little more than
    BOUND."""
    return bound * (1 + CHANCE / math.sqrt(2 * entries))


def copied(sent: Grads) -> dict[str, Tensor]:
    return {name: g.clone() for name, g in sent.items()}


def complaints(defense: UploadDefense, upload: PlantedUpload) -> Iterator[str]:
    """A sentence for each tensor whose error is larger than declared."""
    altered = defense.apply(copied(upload.sent), upload.draws())
    bound = ON_REAL_GRADIENTS.get(defense.name, BOUND) if upload is REAL_UPLOAD else BOUND
    for name, before in upload.sent.items():
        errors, sizes = deviation(altered.sent[name] - before), declared(altered, name)
        unknown = altered.unknown.get(name, torch.zeros(len(errors), dtype=torch.bool))
        allowed = allowance(before[0].numel(), bound)
        for error, size in zip(errors[~unknown], sizes[~unknown], strict=True):
            if error > size * allowed:
                yield (
                    f"{defense.name} on {name} of the {upload} makes an error of {error:.3g} and "
                    f"declares {size:.3g}: expected at least {error / bound:.3g}. Declare the "
                    "standard deviation over the tensor's entries, from the recipe and the sent "
                    "tensors alone, in Disturbed.rounding if zero entries stay zero, else in "
                    "Disturbed.noise; name it in Disturbed.unknown where neither tells it."
                )


def upload_with_the_same_result(
    defense: UploadDefense, upload: PlantedUpload, altered: Disturbed
) -> Disturbed | None:
    """What the defence makes, with other random numbers, of another upload from which it sends the
    same tensors; None where none was found.

    It is looked for by steps x <- x + (what was sent - what would be sent from x).
    """
    draws = upload.draws(seed=1)
    start = copied(altered.sent)
    for _ in range(60):
        again = defense.apply(copied(start), draws)
        start = {name: g + (altered.sent[name] - again.sent[name]) for name, g in start.items()}
        if all(_alike(again.sent[name], sent) for name, sent in altered.sent.items()):
            return again
    return None


def _alike(one: Tensor, other: Tensor) -> bool:
    size = float(other.abs().amax())
    return float((one - other).abs().amax()) <= 8 * torch.finfo(one.dtype).eps * size


def step_complaints(defense: StepDefense, upload: PlantedUpload, batch: int) -> Iterator[str]:
    """A sentence for each way in which a step is changed by more than is declared.

    The planted upload is taken for gradients of examples, `batch` in each client's step.
    """
    sent = upload.sent
    examples = {n: torch.stack([g.roll(b, 0) for b in range(batch)], 1) for n, g in sent.items()}
    steps = [defense.step_gradient(copied(examples), upload.draws(seed)) for seed in range(DRAWS)]
    flat = torch.stack([torch.cat([g.double().flatten(1) for g in s.values()], 1) for s in steps])
    allowed, rounding = allowance(flat[0].numel()), 1e-5 * float(flat.abs().amax())
    noise = float(flat.std(0).square().mean().sqrt())
    where = f"{defense.name} with {batch} example(s) a step on the {upload}"
    if noise > (size := defense.deviation(batch)) * allowed + rounding:
        yield f"{where} adds noise of {noise:.3g} and its deviation({batch}) declares {size:.3g}."
    # what no combination of a step's examples explains
    basis = torch.cat([g.double().flatten(2) for g in examples.values()], 2).mT  # (n, entries, B)
    mean = flat.mean(0).unsqueeze(2)
    factors = torch.linalg.lstsq(basis, mean, driver="gelsd").solution
    left = float((mean - basis @ factors).square().mean().sqrt())
    if left > noise / math.sqrt(DRAWS) * allowed + rounding:
        yield (
            f"{where} changes the gradient by {left:.3g} beside its noise. Expected the mean of "
            "the examples, each times a factor, for that is what attacks are told of; what else "
            "changes an upload is an UploadDefense, which declares its error."
        )
