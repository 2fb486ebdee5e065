"""The model's normalised space in grey levels, and the span of the masked patches there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attacks.lattice.cost import patch_cost
from attacks.lattice.parts import Parts

Reals = NDArray[np.float64]
INTEGRAL = 0.05  # grey levels by which entries may miss integers
FLAT = 1e-3  # share of the length of `zero` that may lie outside a span that holds it
LARGEST = 1024  # largest first entry looked at for an integer vector along `zero`


@dataclass(frozen=True)
class Frame:
    """Grey levels n = gain x + zero of the model's space, and the span in them.

    For the coordinates a of a masked patch a . t = 1; where `zero` is the last row of `space`, the
    patch's coordinate tau along it is 1 too.
    """

    gain: Reals  # (p,) 255 std
    zero: Reals  # (p,) 255 mean
    space: Reals  # (k+1, p): gain B, then zero; (k, p) without zero where the span holds it
    t: Reals  # (k,), see `lattice.unmixing`
    patch_size: int

    @staticmethod
    def of(
        basis: Tensor, t: Tensor, mean: Sequence[float], std: Sequence[float], patch_size: int
    ) -> Frame:
        """The frame of a span with basis (k, p) in the model's space, and its t (k,)."""
        area = patch_size**2
        gain = 255 * np.repeat(np.array(std, dtype=np.float64), area)
        zero = 255 * np.repeat(np.array(mean, dtype=np.float64), area)
        scaled = basis.detach().cpu().double().numpy() * gain
        sums = t.detach().cpu().double().numpy()
        inside = np.linalg.lstsq(scaled.T, zero, rcond=None)[0]
        if np.linalg.norm(zero - inside @ scaled) > FLAT * np.linalg.norm(zero):
            return Frame(gain, zero, np.vstack((scaled, zero)), sums, patch_size)
        # Such as when a flat patch is masked: `zero` is then a combination of the patches.
        scale = 1 + inside @ sums
        if abs(scale) < FLAT:  # the flat patch is black, and t cannot be scaled
            return Frame(gain, zero, scaled, sums, patch_size)
        return Frame(gain, zero, scaled, sums / scale, patch_size)

    @property
    def flat(self) -> bool:
        """Whether `zero` is in the span, as when a flat patch is masked."""
        return len(self.space) == len(self.t)

    @cached_property
    def black(self) -> bool:
        """Whether a masked patch is black, n = 0, so that a . t = 1 tells nothing."""
        if not self.flat:
            return False
        return bool(abs(1 + self.solved(self.zero[None])[0] @ self.t) < FLAT)

    @cached_property
    def _inverse(self) -> Reals:
        """(p, k+1): what takes vectors of the space to their coefficients."""
        inverse: Reals = np.linalg.pinv(self.space).astype(np.float64)
        return inverse

    def solved(self, vectors: Reals) -> Reals:
        """The coefficients (m, k+1) of the space's rows for vectors (m, p), by least squares."""
        return vectors @ self._inverse

    def coordinates(self, vectors: Reals) -> tuple[Reals, Reals]:
        """phi = a . t and tau of vectors (m, p) of the space: equal for combinations of patches."""
        solved = self.solved(vectors)
        phi = solved[:, : len(self.t)] @ self.t
        if self.flat:
            return phi, np.zeros_like(phi) if self.black else phi
        return phi, solved[:, -1]

    @cached_property
    def colour(self) -> tuple[Reals, float]:
        """The smallest integer vector along `zero`, which is in the lattice too, and its tau.

        It is one grey level in every pixel if the channels' means are equal, and zeros if no
        integer vector up to LARGEST lies along `zero`.
        """
        for times in range(1, LARGEST):
            colour = times * self.zero / self.zero[0]
            if abs(colour - np.rint(colour)).max() < 1e-6:
                return np.rint(colour), times / self.zero[0]
        return np.zeros_like(self.zero), np.inf

    def shifted(self, vectors: Reals, tau: Reals) -> tuple[Reals, NDArray[np.bool_]]:
        """Vectors (m, p) less tau (m,) times `zero`, in whole steps of `colour`; whether that is
        exact (m,)."""
        colour, unit = self.colour
        times = tau / unit
        whole = abs(times - np.rint(times)) < INTEGRAL if colour.any() else abs(tau) < INTEGRAL
        return vectors - np.multiply.outer(np.rint(times), colour), whole

    def cost(self, vectors: Reals) -> Reals:
        """How unlike photographs vectors (m, p) in grey levels are, (m,)."""
        return patch_cost(vectors, self.patch_size)

    def parts(self, waves: bool = True) -> Parts:
        """The parts of patches' cost, or of the simpler one without waves."""
        return Parts(len(self.zero), self.patch_size, waves)
