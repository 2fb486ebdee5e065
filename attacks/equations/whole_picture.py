r"""Exact patches where several uploads leave few directions open and pixels are 8-bit.

Patches are x_i = known_i + a_i B, and the integer vectors among them are a lattice of q steps
(`lattice.unmixing.unmix_differences`), which are mostly as long as patches differ. A guess that is
off by a small part of a step therefore gives the patch exactly. Guesses nearer to the lattice than
by chance are taken, the others are made anew beside them, and so on.

In a flat picture the guess is the picture of fewest steps. Where a step is one grey level of a flat
patch, its patches count as soon as they have come out whole by themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.completion import FieldEnergy, complete
from attacks.equations.levels import in_levels, normalised
from attacks.equations.span import Knowledge
from attacks.equations.sparse import fewest_steps
from attacks.lattice.unmixing import Unmixed, unmix_differences
from mjp_privacy.interfaces import Pixels

NEAR = 0.2  # of a step: how far a guess may be from the lattice, along each step
NEARLY_ALL, FEW = 0.9, 4  # patches kept with so few steps: the others are as near as half a step
FALSE = 0.05  # largest share of guesses taken that may be near by chance
ROUNDS = 8  # of new guesses, at most


def whole_picture(
    knowledge: Knowledge, likely: Tensor, energy: FieldEnergy, pixels: Pixels
) -> Tensor:
    """Normalised patches (N, p): exact ones where they can be had, near the most probable picture
    `likely` (N, p), which is made anew for the others."""
    size = energy.patch_size
    sparse = fewest_steps(knowledge, likely, size, pixels)
    lattice = unmix_differences(knowledge.basis, mean=pixels.mean, std=pixels.std, patch_size=size)
    kept = torch.zeros(len(likely), dtype=torch.bool, device=likely.device)
    patches = likely
    if flat := 2 * int(sparse.whole.sum()) > len(likely):
        patches = normalised(sparse.patches, pixels, size)
        if lattice is None or len(lattice.frame.colours):
            kept = sparse.whole
    for _ in range(ROUNDS):
        if lattice is None or spent() or kept.all():
            break
        found, near = _near(lattice, knowledge.known, in_levels(patches, pixels, size), kept)
        if not near.any():
            break
        exact = normalised(found.to(likely), pixels, size)
        patches, kept = torch.where(near.unsqueeze(1), exact, patches), kept | near
        if not flat:
            patches = complete(knowledge, energy, kept, patches)
    return patches


def _near(lattice: Unmixed, known: Tensor, guess: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The patches (N, p) in [0, 1] of the lattice nearest to a guess, and (N,) bool: those beside
    the `kept` ones that the guess is near to, none if that may be by chance."""
    found, whole = lattice.nearest(known, guess)
    steps = lattice.patches[1:]
    missed = torch.linalg.lstsq(steps.mT, (guess.cpu() - found).mT).solution.abs().amax(0)
    missed = missed.masked_fill(~(whole & ((found >= 0) & (found <= 1)).all(1)), torch.inf)
    if float(kept.double().mean()) > NEARLY_ALL and len(steps) <= FEW:
        return found, (missed < 0.5).to(kept.device) & ~kept
    near = (missed < NEAR).to(kept.device) & ~kept
    share, chance = float(near.sum()) / max(int((~kept).sum()), 1), (2 * NEAR) ** len(steps)
    truly = max(share - chance, 0) / (1 - chance)
    certain = (1 - truly) * chance <= FALSE * share
    return found, near if certain else torch.zeros_like(near)
