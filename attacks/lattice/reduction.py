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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import qr

from mjp_privacy.core.machine import derive_seed

Reals = NDArray[np.float64]
FIRST, STEP = 24, 6  # further pixels included at the beginning and in each round
DELTA = 0.99  # Lovász's condition
HALF = 0.501  # size reduction; a little over 1/2, so that rounding does not make it repeat
LEVEL = 64.0  # length of the shortest Gram-Schmidt vector in units of rounding; more is slower
TINY = 1e-12  # of the longest one; a shorter one is taken for zero


def lll(rows: Reals, level: float = LEVEL) -> Reals:
    """A unimodular U (n, n) with U @ rows reduced in the sense of LLL, by FLINT: eight times faster
    than LLL written in Python.

    Rows (n, m >= n) need not be whole: they are rounded after a scaling that gives the shortest
    Gram-Schmidt vector the length `level`.
    """
    from flint import fmpz_mat  # here: this attack alone needs it

    lengths = abs(np.linalg.qr(rows.T)[1].diagonal())
    scaled = np.rint(rows * (level / max(lengths.min(), TINY * lengths.max())))
    matrix = fmpz_mat([[int(entry) for entry in row] for row in scaled])
    transform = matrix.lll(True, DELTA, HALF)[1]
    return np.array([[int(entry) for entry in row] for row in transform.tolist()], dtype=np.float64)


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

    def missed(self, count: int) -> NDArray[np.int64]:
        """The pixels not included yet, first those at which the shortest `count` vectors of the
        reduced basis miss integers most. In a flat picture few pixels tell patches apart."""
        vectors = self.members[:count, : len(self.pivots)] @ self.full
        misfit = abs(vectors - np.rint(vectors))
        rest = order_of_pixels(self)
        taken = np.isin(rest, self.pixels)
        rank = np.argsort(-misfit[:, rest], axis=1, kind="stable").argsort(1).min(0)
        return rest[~taken][np.argsort(rank[~taken], kind="stable")]

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
        members = np.rint(lll(larger.rows()) @ larger.members)
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
