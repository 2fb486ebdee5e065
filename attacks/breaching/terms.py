"""What may be added to breaching's objective, and another distance of gradients. Import it late.

    attacker.regularizers += [Borders(0.1, patch_size=16), Near(0.01, mean)]

breaching sums its objective and what each term gives for the candidate pictures (B, C, H, W), which
are normalised. A term is its weight times a mean over the pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attacks.breaching.parts import parts_of_breaching
from attacks.equations.completion import FieldEnergy

with parts_of_breaching():
    from breaching.attacks.auxiliaries.objectives import Euclidean

TINY = 1e-12  # under the root of a norm, which has no derivative at 0


class SquaredDistance(Euclidean):
    """sum_l |g_l(x) - g_l|^2 / sum_l |g_l|^2 over the parameters l: 1 for a candidate without any
    gradient, so that a term's weight means the same beside weak and strong uploads."""

    def gradient_based_loss(
        self, gradient_rec: Sequence[Tensor], gradient_data: Sequence[Tensor]
    ) -> Tensor:
        """The distance of a candidate's gradients from the uploaded ones."""
        norm = torch.stack([grad.square().sum() for grad in gradient_data]).sum()
        halved: Tensor = super().gradient_based_loss(gradient_rec, gradient_data)
        return 2 * halved / norm


class Term(nn.Module):
    """One summand of the objective: `weight` times `value`."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def initialize(self, *_: Any) -> None:
        """breaching calls it before each trial; there is nothing to prepare."""

    def forward(self, pictures: Tensor) -> Tensor:
        """What the objective gets for the pictures (B, C, H, W)."""
        return self.weight * self.value(pictures)

    def value(self, pictures: Tensor) -> Tensor:
        """The term itself, a scalar."""
        raise NotImplementedError


class Borders(Term):
    """How far pictures step across the borders of their patches: for each border between two
    patches the norm of the step from one side's row of pixels to the other's, over the square root
    of the row's number of values. A step of 1 in every pixel of every border is 1."""

    def __init__(self, weight: float, patch_size: int) -> None:
        super().__init__(weight)
        self.patch_size = patch_size

    def value(self, pictures: Tensor) -> Tensor:
        """The mean over all borders; 0 for a picture of one patch."""
        sideways, down = self._sizes(pictures), self._sizes(pictures.mT)
        sizes = torch.cat((sideways.flatten(), down.flatten()))
        return sizes.mean() if len(sizes) else pictures.sum() * 0

    def _sizes(self, pictures: Tensor) -> Tensor:
        """Of the steps between columns, (B, rows of patches, borders)."""
        side = self.patch_size
        steps = pictures[..., side::side] - pictures[..., side - 1 : -1 : side]
        by_patch = steps.unflatten(2, (-1, side))  # (B, C, rows of patches, side, borders)
        return (by_patch.square().mean((1, 3)) + TINY).sqrt()


class FieldPrior(Term):
    """How improbable pictures are under a Gaussian field with mean colour m:

        (x - m)^T Sigma^-1 (x - m) / number of values of x,

    which is 1 on average over pictures that are drawn from the field."""

    def __init__(self, weight: float, energy: FieldEnergy) -> None:
        super().__init__(weight)
        self.energy = energy

    def value(self, pictures: Tensor) -> Tensor:
        """The mean over all pictures."""
        energy = self.energy.on(pictures.device)
        basis, precision = energy.basis.to(pictures), energy.precision.to(pictures)
        centred = pictures - energy.mean.to(pictures).view(-1, 1, 1)
        waves = basis @ centred @ basis.mT
        return (waves * (precision * waves.unsqueeze(1)).sum(2)).mean()


class Near(Term):
    """The mean squared distance of pictures from a target (B, C, H, W)."""

    def __init__(self, weight: float, target: Tensor) -> None:
        super().__init__(weight)
        self.target = target

    def value(self, pictures: Tensor) -> Tensor:
        """The mean over all values."""
        return (pictures - self.target).square().mean()
