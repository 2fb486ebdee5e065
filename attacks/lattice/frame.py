"""The model's normalised space in grey levels, and the hull of the masked patches there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attacks.lattice.cost import patch_cost
from attacks.lattice.parts import Parts
from attacks.lattice.reduction import lll

Reals = NDArray[np.float64]
INTEGRAL = 0.05  # grey levels by which entries may miss integers
FLAT = 1e-2  # share of the length of a flat vector outside the space for which it is looked at
CLOSE = 1e4  # weight of that share when the shortest flat vector of whole grey levels is looked for
FINE = 2.0**14  # precision of that search


@dataclass(frozen=True)
class Frame:
    """Grey levels n = gain x + zero of the model's space, and the hull of the masked patches.

    With one more pixel phi, which is 1 in every patch, the integer combinations of the patches are
    vectors (n, phi) of a lattice: a patch has phi = 1, a difference of two has 0. So nothing in it
    depends on the normalisation, and a black patch is (0, 1).
    """

    gain: Reals  # (p,) 255 std
    zero: Reals  # (p,) 255 mean
    space: Reals  # (k, p + 1): any basis of the span of the masked patches' (n, phi)
    patch_size: int

    @staticmethod
    def of(wide: Tensor, mean: Sequence[float], std: Sequence[float], patch_size: int) -> Frame:
        """The frame of `equations.span.hull_rows`, (k, p + 1) in the model's space."""
        area = patch_size**2
        gain = 255 * np.repeat(np.array(std, dtype=np.float64), area)
        zero = 255 * np.repeat(np.array(mean, dtype=np.float64), area)
        rows = wide.detach().cpu().double().numpy()
        vectors, phi = rows[:, :-1], rows[:, -1:]
        return Frame(gain, zero, np.hstack((vectors * gain + phi * zero, phi)), patch_size)

    @cached_property
    def colours(self) -> Reals:
        """(f, p) integers, f up to the number of channels: a basis of the flat vectors of phi = 0.

        There are some where flat patches of several colours are masked. What is known but for the
        masked patches' differences then has no level along them.
        """
        area = self.patch_size**2
        channels = len(self.zero) // area
        flat = np.repeat(np.eye(channels), area, axis=1) / np.sqrt(area)
        basis = np.linalg.qr(self.space.T)[0]
        last = basis[-1]
        within = basis[:-1] - np.outer(basis[:-1] @ last, last) / max(last @ last, 1e-300)
        directions, sizes, _ = np.linalg.svd(within, full_matrices=False)
        differences = directions[:, sizes > 0.5]  # phi = 0 takes one direction away
        held = flat @ differences
        inside, shares, _ = np.linalg.svd(held, full_matrices=False)
        free = inside[:, shares**2 > 1 - FLAT**2]  # colours whose flat vectors are in the space
        if not free.shape[1]:
            return np.zeros((0, len(self.zero)))
        outside = np.eye(channels) - free @ free.T
        whole = lll(np.hstack((np.eye(channels), CLOSE * outside)), FINE)
        near = np.argsort(np.linalg.norm(whole @ outside, axis=1), kind="stable")
        colours = np.repeat(whole[near[: free.shape[1]]], area, axis=1)
        beyond = colours - colours @ differences @ differences.T
        return colours[abs(beyond).max(1) < INTEGRAL]  # others are nearly flat

    def levelled(self, vectors: Reals, guess: Reals) -> Reals:
        """Vectors (m, p), shifted by multiples of `colours` to the level of the guess (p,)."""
        if not len(self.colours):
            return vectors
        times = np.linalg.lstsq(self.colours.T, (guess - vectors).T, rcond=None)[0]
        return vectors + np.rint(times).T @ self.colours

    def cost(self, vectors: Reals) -> Reals:
        """How unlike photographs vectors (m, p) in grey levels are, (m,)."""
        return patch_cost(vectors, self.patch_size)

    def parts(self, waves: bool = True) -> Parts:
        """The parts of patches' cost, or of the simpler one without waves."""
        return Parts(len(self.zero), self.patch_size, waves)
