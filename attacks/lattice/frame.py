"""Grey levels of the model's space, and the span of the masked patches in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attacks.lattice.cost import OUTSIDE, gradient_cost, outside, patch_cost

Reals = NDArray[np.float64]


INTEGRAL = 0.05  # grey levels from integers, over all pixels


FLAT = 1e-3  # of the mean's length: a constant is in the span


LARGEST = 1024  # for a colour along the mean


@dataclass(frozen=True)
class Frame:
    """Grey levels of the model's space: n = gain x + zero, and the span in them."""

    gain: Reals  # (p,) 255 std
    zero: Reals  # (p,) 255 mean
    space: Reals  # (k+1, p): gain B, then zero; without it where zero is in the span
    t: Reals  # (k,)
    patch_size: int

    @staticmethod
    def of(
        basis: Tensor, t: Tensor, mean: Sequence[float], std: Sequence[float], patch_size: int
    ) -> Frame:
        area = patch_size**2
        gain = 255 * np.repeat(np.array(std, dtype=np.float64), area)
        zero = 255 * np.repeat(np.array(mean, dtype=np.float64), area)
        scaled = basis.detach().cpu().double().numpy() * gain
        sums = t.detach().cpu().double().numpy()
        inside = np.linalg.lstsq(scaled.T, zero, rcond=None)[0]
        if np.linalg.norm(zero - inside @ scaled) > FLAT * np.linalg.norm(zero):
            return Frame(gain, zero, np.vstack((scaled, zero)), sums, patch_size)
        # A flat patch (saturated, say) is masked: a constant is a combination of the patches.
        scale = 1 + inside @ sums
        if abs(scale) < FLAT:  # that patch is black: 0 times anything
            return Frame(gain, zero, scaled, sums, patch_size)
        return Frame(gain, zero, scaled, sums / scale, patch_size)

    @property
    def flat(self) -> bool:
        """A constant is in the span."""
        return len(self.space) == len(self.t)

    @property
    def black(self) -> bool:
        """One of the patches is zero, and a . t = 1 says nothing."""
        if not self.flat:
            return False
        inside = np.linalg.lstsq(self.space.T, self.zero, rcond=None)[0]
        return bool(abs(1 + inside @ self.t) < FLAT)

    def coordinates(self, vectors: Reals) -> tuple[Reals, Reals]:
        """a . t and tau of vectors (m, p) of the space: equal for combinations of pictures."""
        found = np.linalg.lstsq(self.space.T, vectors.T, rcond=None)[0].T.astype(np.float64)
        phi = found[:, : len(self.t)] @ self.t
        if self.flat:
            return phi, np.zeros_like(phi) if self.black else phi
        return phi, found[:, -1]

    def colour(self) -> tuple[Reals, float]:
        """The smallest vector of integers along `zero`, and its tau: it is in the lattice too.

        A grey level everywhere where the channels' means are equal.
        """
        for times in range(1, LARGEST):
            colour = times * self.zero / self.zero[0]
            if abs(colour - np.rint(colour)).max() < 1e-6:
                return np.rint(colour), times / self.zero[0]
        return np.zeros_like(self.zero), np.inf

    def shifted(self, vectors: Reals, tau: Reals) -> tuple[Reals, NDArray[np.bool_]]:
        """Vectors (m, p) less (m,) tau * zero, and where that is a shift by whole grey levels."""
        colour, unit = self.colour()
        times = tau / unit
        whole = abs(times - np.rint(times)) < INTEGRAL if colour.any() else abs(tau) < INTEGRAL
        return vectors - np.multiply.outer(np.rint(times), colour), whole

    def cost(self, vectors: Reals) -> Reals:
        return patch_cost(vectors, self.patch_size)

    def sparse(self, vectors: Reals) -> Reals:
        """A cost with fewer ways to get stuck: sparse gradients and the box."""
        return gradient_cost(vectors, self.patch_size) + OUTSIDE * outside(vectors)
