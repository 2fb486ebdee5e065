"""Picks from all bases of the lattice the one that consists of patches."""

from __future__ import annotations

import numpy as np

from attacks.lattice.descent import deepened, evened
from attacks.lattice.frame import INTEGRAL, Frame, Reals
from attacks.lattice.search import exchanged

WHITE = 255  # grey levels that phi counts: 1 / 255 of white is one grey level and no patch
APART = 10  # times as far from integers as the last vector of the lattice must be what is beyond it


def combination_basis(frame: Frame, vectors: Reals, distance: Reals) -> Reals | None:
    """A basis (k, p + 1) of the integer combinations (n, phi) of patches, or None, from integer
    vectors (s, p + 1) of the space and their distance (s,) from integers."""
    rank = len(frame.space)
    missed = WHITE * abs(vectors[:, -1] - np.rint(vectors[:, -1]))
    distance = np.where((np.rint(vectors) != 0).any(1), np.maximum(distance, missed), np.inf)
    order = np.argsort(distance, kind="stable")
    last, beyond = distance[order[rank - 1]], distance[order[rank:]].min(initial=np.inf)
    if last >= INTEGRAL or beyond < APART * last:
        return None
    return np.rint(vectors[order[:rank]])


def patch_basis(frame: Frame, vectors: Reals) -> Reals | None:
    """The patches (k, p) from any basis (k, p + 1) of their combinations; None if phi = 1 cannot be
    reached."""
    units = _unit_basis(frame, vectors)
    if units is None:
        return None
    ends = []
    for start in (units, evened(frame.parts(), units)):
        ends.append(exchanged(frame.parts(), exchanged(frame.parts(waves=False), start)))
    best = min(ends, key=lambda patches: float(frame.cost(patches).sum()))
    return deepened(frame, best)


def _unit_basis(frame: Frame, vectors: Reals) -> Reals | None:
    """A basis (k, p) of the same lattice in which every vector has phi = 1, as patches have: from
    the others the multiple of such a vector is subtracted that gives the least cost."""
    sparse = frame.parts(waves=False)
    vectors, phi = vectors[:, :-1].copy(), vectors[:, -1].copy()
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
