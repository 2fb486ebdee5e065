r"""Whether a patch stands in a batch: one equation for each patch alone, from LayerNorm's length.

Block 0's first layer says of the patch x at position i (`equations.tokens`), z = W x + beta + e_i:

    P diag(gamma) (z - mean(z)) + s(x) P b = 0,    s(x) the standard deviation of z's entries.

For patches x = x_i + sum_j c_j d_j, where d_j are differences of the batch's patches, this holds
but for the length: the part along P b gives a number s that is linear in c, and s(x)^2 is quadratic
in c. Both agree for the patches of the batch and by chance for one vector in many thousands. As all
of it is a quadratic in c, a hundred thousand vectors are tested in a few hundredths of a second.

It needs B N + 1 < D tokens of a batch, and a LayerNorm with biases b, as trained ones have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attacks.equations.names import QKV
from attacks.equations.patch_system import gradient
from attacks.equations.tokens import TokenEquations, sees_a_norm, token_equations
from attacks.lattice.frame import Frame, Reals
from attacks.lattice.parts import Places
from mjp_privacy.interfaces import AttackerView, ClientUpdate

CLOSE = 8.0
"""Units of rounding by which both lengths may differ, times |gamma| / |P b|: so much a small bias b
magnifies the rounding of z. Those of true patches differ by up to 1 of it in float32 gradients of a
trained ViT-Ti, where it is 4 to 10; and of `patch14_vit`, where it is 130, by up to 4, one by 9."""
MOST = 5e-4  # a share by which a part of all sums of differences agrees: the test says nothing
LEAST = 1e-9  # the same as a share: exact pixels are found in the client's gradient only so exactly
TELLS = 1e-4  # the length of P b, as a share of b's, from which it tells patches apart


@dataclass(frozen=True)
class NormTest:
    """The test of one step's patches, in grey levels."""

    equations: TokenEquations
    frame: Frame
    eps: float  # of the LayerNorm
    close: float  # share by which both lengths may differ

    @classmethod
    def of(
        cls, view: AttackerView, update: ClientUpdate, index: int, batch: int, frame: Frame
    ) -> NormTest | None:
        """The test of the step at `index`, of `batch` pictures; None where there is none."""
        norm = getattr(view.model.blocks[0], "norm1", None)
        if not isinstance(norm, torch.nn.LayerNorm) or sees_a_norm(view.model) is not None:
            return None
        tokens = view.model.tokens + (batch - 1) * view.model.patch_embed.num_patches
        if QKV not in update.grads or tokens >= gradient(view, update, QKV).shape[-1]:
            return None
        equations = token_equations(view, update, index, batch)
        if float(equations.shift.norm()) <= TELLS * float(norm.bias.detach().double().norm()):
            return None
        magnified = float(norm.weight.detach().double().norm()) / float(equations.shift.norm())
        close = max(CLOSE * magnified * torch.finfo(update.dtype).eps, LEAST)
        if close > MOST:
            return None
        return cls(equations, frame, norm.eps, close)

    def along(self, steps: Reals) -> LatticeTest:
        """The same for sums of integer steps (r, p)."""
        pushed = self._centred(torch.from_numpy(steps / self.frame.gain), 0.0)
        return LatticeTest(
            self, pushed.numpy(), (pushed @ pushed.mT).numpy() / pushed.shape[1], self._told(pushed)
        )

    def at(self, patch: Reals, place: int) -> tuple[Reals, float, float]:
        """z (D,) of a patch (p,) in grey levels, centred; its squared length and the s told."""
        normalised = torch.from_numpy((patch - self.frame.zero) / self.frame.gain)
        z = self._centred(normalised.unsqueeze(0), self.equations.own[place].cpu())
        squared = float(z.square().mean()) + self.eps
        return z[0].numpy(), squared, float(self._told(z)[0])

    def _centred(self, patches: Tensor, added: Tensor | float) -> Tensor:
        z = patches @ self.equations.weight.cpu().mT + added
        return z - z.mean(-1, keepdim=True)

    def _told(self, z: Tensor) -> Reals:
        """The s that the part along P b tells, (m,)."""
        shift = self.equations.shift.cpu()
        told = z @ (self.equations.system.cpu().mT @ shift)
        return np.asarray(-(told / shift.square().sum()).numpy())


@dataclass(frozen=True)
class LatticeTest:
    """The test of patches that are a given one and a sum of a few steps."""

    test: NormTest
    pushed: Reals  # (r, D) what each step adds to z
    gram: Reals  # (r, r)
    told: Reals  # (r,) what each step adds to the s that is told

    def passed(self, patch: Reals, place: int, rows: Places, signs: Reals) -> Places:
        """Which sums patch + signs @ steps[rows] pass; rows and signs (n, k), k may be 0."""
        z, squared, told = self.test.at(patch, place)
        toward = self.pushed @ z / len(z)
        lengths = squared + 2 * (signs * toward[rows]).sum(1)
        for first in range(rows.shape[1]):
            for second in range(rows.shape[1]):
                both = self.gram[rows[:, first], rows[:, second]]
                lengths = lengths + signs[:, first] * signs[:, second] * both
        true = np.sqrt(np.maximum(lengths, self.test.eps))
        away = abs(told + (signs * self.told[rows]).sum(1) - true)
        return np.flatnonzero(away <= self.test.close * true)
