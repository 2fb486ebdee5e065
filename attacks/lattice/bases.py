"""Picks from all bases of the lattice the one that consists of patches."""

from __future__ import annotations

import numpy as np

from attacks.lattice.descent import deepened, evened
from attacks.lattice.frame import INTEGRAL, Frame, Reals
from attacks.lattice.reduction import lll
from attacks.lattice.search import exchanged

RELATION = 1e-3  # weight of a combination's coefficients in LLL
FINE = 2.0**14  # the shortest vector for LLL: RELATION must not vanish by rounding
FAR = 1e7  # weight of phi in LLL, so large that LLL makes phi whole


def combination_basis(frame: Frame, vectors: Reals, distance: Reals) -> Reals | None:
    """A basis of the integer combinations of patches, from integer vectors of the space, or None.

    vectors (s, p) and their distance (s,) from integers -> (k, p), or (k-1, p) where a patch is
    black. The lattice also holds `frame.colour`, multiples of which are taken out of the vectors.
    """
    wanted = len(frame.t) + int(not frame.flat and frame.colour[0].any())
    distance = np.where((np.rint(vectors) != 0).any(1), distance, np.inf)
    nearest = np.argsort(distance, kind="stable")[:wanted]
    if (distance[nearest] >= INTEGRAL).any():
        return None
    integers = np.rint(vectors[nearest])
    phi, tau = frame.coordinates(integers)
    basis, whole = frame.shifted(integers, tau - phi)
    if not whole.all():
        return None
    basis = basis[(basis != 0).any(1)]
    rank = len(frame.t) - frame.black
    if len(basis) > rank:  # one vector too many: LLL makes the relation between them a zero row
        basis = _reduced(basis, np.zeros(len(basis)))
    if not frame.black:
        phi = frame.coordinates(basis)[0]
        # Where a patch is a multiple of a lattice vector, as a flat one is, phi is a fraction for
        # that vector: only the vectors of whole phi are combinations of patches.
        if abs(phi - np.rint(phi)).max() > INTEGRAL:
            basis = _reduced(np.vstack((basis, 0 * basis[:1])), FAR * np.append(phi, 1))
            basis = basis[abs(frame.coordinates(basis)[0] % 1 - 0.5) > 0.5 - 1e-3]
    return basis if len(basis) == rank else None


def _reduced(vectors: Reals, also: Reals) -> Reals:
    """A basis of the lattice of `vectors` for which LLL makes `also`, one entry per vector, small;
    zero rows are dropped."""
    rows = np.hstack((vectors, also[:, None], RELATION * np.eye(len(vectors))))
    vectors = np.rint(lll(rows, FINE) @ vectors)
    return vectors[(vectors != 0).any(1)]


def patch_basis(frame: Frame, vectors: Reals) -> Reals | None:
    """The patches (k, p) from any basis of their combinations; None if none has a . t = 1."""
    units = _unit_basis(frame, vectors)
    if units is None:
        return None
    ends = []
    for start in (units, evened(frame.parts(), units)):
        if frame.black:
            start = np.vstack((start, 0 * start[:1]))
        ends.append(exchanged(frame.parts(), exchanged(frame.parts(waves=False), start)))
    best = min(ends, key=lambda patches: float(frame.cost(patches).sum()))
    return deepened(frame, best)


def _unit_basis(frame: Frame, vectors: Reals) -> Reals | None:
    """A basis of the same lattice in which every vector has phi = a . t = 1, as patches have: from
    the others the multiple of such a vector is subtracted that gives the least cost."""
    sparse = frame.parts(waves=False)
    if frame.black:  # phi tells nothing, so any vector may be a patch; its cost tells the sign
        cost = np.stack((sparse.cost(sparse.of(vectors)), sparse.cost(sparse.of(-vectors))))
        return np.where(cost.argmin(0)[:, None] == 0, vectors, -vectors)
    vectors, phi = vectors.copy(), np.rint(frame.coordinates(vectors)[0])
    if not (abs(phi) == 1).any():
        vectors, phi = _with_a_unit(vectors, phi)
    if not (abs(phi) == 1).any():
        return None
    vectors[phi == -1] *= -1
    phi[phi == -1] = 1
    while (phi != 1).any():
        units = vectors[phi == 1]
        rest = np.flatnonzero(phi != 1)
        rest = rest[abs(phi[rest]) <= max(2, abs(phi[rest]).min())]
        trials = [
            sign * vectors[row] - (sign * phi[row] - 1) * units for row in rest for sign in (1, -1)
        ]
        cost = np.stack([sparse.cost(sparse.of(trial)) for trial in trials])
        best, unit = np.unravel_index(int(cost.argmin()), cost.shape)
        row = rest[best // 2]
        vectors[row], phi[row] = trials[best][unit], 1
    return vectors


def _with_a_unit(vectors: Reals, phi: Reals) -> tuple[Reals, Reals]:
    """Vectors and phi after Euclid's algorithm, which tries to make one phi 1 or -1."""
    vectors, phi = vectors.copy(), phi.copy()
    while not (abs(phi) == 1).any() and (phi != 0).sum() > 1:
        order = np.argsort(np.where(phi == 0, np.inf, abs(phi)), kind="stable")
        small, large = order[0], order[1]
        times = np.rint(phi[large] / phi[small])
        vectors[large] -= times * vectors[small]
        phi[large] -= times * phi[small]
    return vectors, phi
