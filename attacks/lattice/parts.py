"""Costs of sums of patches, from numbers that are computed once for each patch.

`lattice.cost` is a sum of simple functions of numbers that are affine in the patch: its colour DCT,
the differences of neighbouring pixels, the pixels. Of v + v' - v'' they are the same sum of three
rows, so that thousands of such trials need no matrix product and no differences. All trials are
first ranked by every few of these numbers in single precision (`thin`); the whole cost, in
double precision, decides among the best (KEPT).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.lattice.cost import GRADIENT, GREY, OUTSIDE, waves_of

Reals = NDArray[np.float64]
Singles = NDArray[np.float32]
Places = NDArray[np.int64]
KEPT = 48  # trials whose whole cost is computed
EVERY_WAVE, EVERY_GRADIENT, EVERY_PIXEL = 6, 9, 8  # of what `thin` holds; it weighs accordingly
LEAST = 0.5  # grey levels: smaller differences weigh no more than one of this size
TOGETHER = 4  # numbers multiplied before their logarithm is taken


@dataclass(frozen=True)
class Border:
    """What a patch must continue: pixels beside it, each with the grey level behind the border."""

    inner: Places  # (b,) pixels of the patch
    beyond: Reals  # (b,) the grey levels that they touch
    weight: float


@dataclass(frozen=True)
class Parts:
    """The numbers whose cost is summed, for patches of `length` = C*P*P pixels.

    waves  whether DCT coefficients count; without them it is the simpler `sparse` cost, in which a
           search gets stuck less often
    """

    length: int
    patch_size: int
    waves: bool = True

    def of(self, vectors: Reals) -> Reals:
        """(n, length) in grey levels -> (n, q): waves, then gradients, then pixels."""
        size = self.patch_size
        tiles = vectors.reshape(len(vectors), -1, size, size)
        rows = [np.diff(tiles, axis=-1), np.diff(tiles, axis=-2)]
        groups = [group.reshape(len(vectors), -1) for group in rows] + [vectors]
        if self.waves:
            basis, typical = waves_of(self.length, size)
            groups.insert(0, (vectors - GREY) @ (basis.T / typical))
        return np.concatenate(groups, axis=1)

    def cost(self, parts: Reals, border: Border | None = None) -> Reals:
        """The whole cost (n,) of patches from their parts (n, q)."""
        total = self._sum(parts, *self._ends, 1.0, self._weight, OUTSIDE)
        if border is not None:
            steps = parts[:, self._ends[1] + border.inner] - border.beyond
            total = total + border.weight * _logs(1 + abs(steps))
        return total

    def mean_step(self, parts: Reals) -> Reals:
        """The mean of log(1 + |difference of neighbouring pixels|) (n,), from parts (n, q)."""
        first, second = self._ends
        return _logs(1 + abs(parts[:, first:second])) / (second - first)

    def curvature(self, parts: Reals) -> Reals:
        """Weights (first two groups,) of the quadratic form that touches the cost at parts (q,) and
        is nowhere below it; pixels, which cost nothing inside the box, are left out."""
        first, second = self._ends
        size = abs(parts[first:second])
        steps = 0.5 * self._weight / ((1 + size) * np.maximum(size, LEAST))
        return np.concatenate((1 / (1 + parts[:first] ** 2), steps))

    def thin(self, parts: Reals) -> Singles:
        """The parts (n, s) by which trials are ranked."""
        return parts[:, self._columns].astype(np.float32)

    def rank(self, thin: Singles) -> Singles:
        """About the cost (...,) of trials with the thin parts (..., s), which are overwritten."""
        weights = (EVERY_WAVE, EVERY_GRADIENT * self._weight, EVERY_PIXEL * OUTSIDE)
        return self._sum(thin, *self._thin_ends, *weights)

    def _sum(
        self,
        parts: NDArray[Any],
        first: int,
        second: int,
        wave: float,
        gradient: float,
        outside: float,
    ) -> NDArray[Any]:
        """The weighted costs of parts (..., q), whose groups end at `first` and `second`."""
        total = gradient * _logs(1 + abs(parts[..., first:second]))
        if first:
            total += wave * _logs(1 + np.square(parts[..., :first]))
        pixels = parts[..., second:]
        beyond = np.maximum(abs(pixels - pixels.dtype.type(127.5)) - 127.5, 0).sum(-1)
        return total + outside * beyond

    @property
    def _weight(self) -> float:
        return GRADIENT if self.waves else 1.0

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """Where the waves end, and where the gradients do."""
        inner = 2 * self.length // self.patch_size * (self.patch_size - 1)
        first = self.length if self.waves else 0
        return first, first + inner

    @cached_property
    def _columns(self) -> Places:
        first, second = self._ends
        ranges = (
            np.arange(0, first, EVERY_WAVE),
            np.arange(first, second, EVERY_GRADIENT),
            np.arange(second, second + self.length, EVERY_PIXEL),
        )
        return np.concatenate(ranges)

    @cached_property
    def _thin_ends(self) -> tuple[int, int]:
        first, second = self._ends
        return int((self._columns < first).sum()), int((self._columns < second).sum())


def _logs(values: NDArray[Any]) -> NDArray[Any]:
    """The sum of log(values) over the last axis, for values of at least 1."""
    whole = values.shape[-1] // TOGETHER
    product = values[..., :whole]
    for part in range(1, TOGETHER):
        product = product * values[..., part * whole : (part + 1) * whole]
    rest = np.log(values[..., TOGETHER * whole :]).sum(-1)
    return np.log(product).sum(-1) + rest
