"""Finds integer vectors close to a subspace, by lattice reduction.

8-bit pixels are integers. If k patches span a space known to a small fraction of a grey level,
then the integer vectors inside that space are the integer combinations of the patches: a lattice
of rank k, which LLL (Lenstra, Lenstra, Lovász 1982) finds and real-valued methods cannot.

With r pivot pixels every vector of the space is v = v_pivot R, and for integer vectors of the space
both v_pivot and, at each further pixel c, v_pivot R_c are integers up to the noise. So they are
short vectors of the lattice spanned by

    [ W  R_c / noise ]        W W^T: squared length of R's rows in a given metric,
    [ 0    I / noise ]

and once enough pixels c are included, they are the only short ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import qr

from mjp_privacy.core.seeding import derive_seed

Reals = NDArray[np.float64]
FIRST, STEP = 24, 6  # further pixels included at the beginning and in each round
DELTA = 0.99  # Lovász's condition
HALF = 0.501  # size reduction; a little over 1/2, so that rounding does not make it repeat


def lll(rows: Reals, most: int = 1_000_000) -> tuple[Reals, Reals]:
    """LLL in floating point: a unimodular U with U @ rows reduced, and the Gram-Schmidt lengths.

    It works on the triangular factor of the rows, which rotations keep triangular, and takes at
    most `most` steps.
    """
    factor = np.linalg.qr(rows.T)[1].T.copy()
    transform = np.eye(len(rows))
    at = 1
    for _ in range(most):
        if at >= len(rows):
            break
        _subtract(factor, transform, at, at - 1)
        before, here = factor[at - 1, at - 1], factor[at, at - 1 : at + 1]
        if here[1] ** 2 + here[0] ** 2 >= DELTA * before**2:
            for row in range(at - 2, -1, -1):
                _subtract(factor, transform, at, row)
            at += 1
        else:
            factor[[at - 1, at]] = factor[[at, at - 1]]
            transform[[at - 1, at]] = transform[[at, at - 1]]
            kept, cleared = factor[at - 1, at - 1], factor[at - 1, at]
            length = math.hypot(kept, cleared)
            rotation = np.array([[kept, -cleared], [cleared, kept]]) / length
            factor[at - 1 :, at - 1 : at + 1] = factor[at - 1 :, at - 1 : at + 1] @ rotation
            factor[at - 1, at] = 0.0
            at = max(at - 1, 1)
    return transform, abs(factor.diagonal())


def _subtract(factor: Reals, transform: Reals, at: int, row: int) -> None:
    """Size reduction of row `at` by an earlier `row`, in place."""
    share = factor[at, row] / factor[row, row]
    if share > HALF or share < -HALF:
        times = round(share)
        factor[at, : row + 1] -= times * factor[row, : row + 1]
        transform[at] -= times * transform[row]


@dataclass(frozen=True)
class SpanLattice:
    """A reduced basis of the vectors of a space that are integers at some of the pixels."""

    full: Reals  # (r, p) the space by its pivots: v = v[pivots] @ full
    pivots: NDArray[np.int64]  # (r,)
    pixels: NDArray[np.int64]  # (c,) the further pixels included so far
    members: Reals  # (s, r + c) integers: v at the pivots, then the integers nearest v at `pixels`
    metric: Reals  # (p, p) symmetric: what counts as short
    noise: float  # grey levels that the space may be off: the unit of distances from integers

    def vectors(self) -> tuple[Reals, Reals]:
        """The reduced basis (s, p), not rounded, and each vector's distance (s,) from integers."""
        vectors = self.members[:, : len(self.pivots)] @ self.full
        return vectors, abs(vectors - np.rint(vectors)).max(1)

    def rows(self) -> Reals:
        """What LLL shortens (s, r + c): each member's length, and its distance from integers."""
        at_pivots, near = np.split(self.members, [len(self.pivots)], axis=1)
        misfit = at_pivots @ self.full[:, self.pixels] - near
        return np.hstack((at_pivots @ self._root(), misfit / self.noise))

    def _root(self) -> Reals:
        """W (r, r): v[pivots] W has the length of v in the metric."""
        gram = self.full @ self.metric @ self.full.T
        return np.linalg.cholesky(gram + 1e-12 * np.trace(gram) * np.eye(len(gram)))

    def extended(self, pixels: NDArray[np.int64]) -> SpanLattice:
        """The lattice with further pixels included, reduced again."""
        near = np.rint(self.members[:, : len(self.pivots)] @ self.full[:, pixels])
        old = np.hstack((self.members, near))
        new = np.eye(len(pixels), old.shape[1], old.shape[1] - len(pixels))
        included = np.concatenate((self.pixels, pixels))
        larger = SpanLattice(
            self.full, self.pivots, included, np.vstack((old, new)), self.metric, self.noise
        )
        members = np.rint(lll(larger.rows())[0] @ larger.members)
        return SpanLattice(self.full, self.pivots, included, members, self.metric, self.noise)

    def nearest(self, points: Reals, centre: Reals) -> Reals:
        """Integer vectors of points (m, p) + space near `centre`, by Babai's nearest plane."""
        at_zero = points - points[:, self.pivots] @ self.full  # zero at the pivots
        root = self._root()
        pull = (centre - at_zero) @ self.metric @ self.full.T
        target = np.hstack((np.linalg.solve(root, pull.T).T, -at_zero[:, self.pixels] / self.noise))
        orthogonal, triangle = np.linalg.qr(self.rows().T)  # rows = triangle^T orthogonal^T
        remainder = target @ orthogonal
        combination = np.zeros((len(points), self.members.shape[1]))
        for row in range(len(triangle) - 1, -1, -1):
            times = np.rint(remainder[:, row] / triangle[row, row])[:, None]
            remainder -= times * triangle[:, row]
            combination += times * self.members[row]
        return at_zero + combination[:, : len(self.pivots)] @ self.full


def span_lattice(space: Reals, metric: Reals, noise: float) -> SpanLattice:
    """The lattice of a space (r, p), given by any basis, before further pixels are included."""
    basis = np.linalg.qr(space.T)[0].T
    pivots = qr(basis, pivoting=True, mode="r")[1][: len(basis)]
    full = np.linalg.solve(basis[:, pivots], basis)
    no_pixels = np.zeros(0, dtype=np.int64)
    return SpanLattice(full, pivots, no_pixels, np.eye(len(basis)), metric, noise)


def order_of_pixels(lattice: SpanLattice) -> NDArray[np.int64]:
    """All pixels but the pivots, in a seeded random order that does not depend on the picture."""
    rest = np.setdiff1d(np.arange(lattice.full.shape[1]), lattice.pivots)
    return np.random.default_rng(derive_seed("span lattice", len(rest))).permutation(rest)
