"""Which basis of the lattice is the pictures'."""

from __future__ import annotations

import numpy as np

from attacks.lattice.frame import INTEGRAL, Frame, Reals
from attacks.lattice.reduction import lll
from attacks.lattice.search import _exchanged, _shortened

RELATION = 1e-3  # weight of a combination's own length


FAR = 1e7


def _combinations(frame: Frame, vectors: Reals, distance: Reals) -> Reals | None:
    """A basis of the combinations of pictures, from the integer vectors of the space.

    (k, p), or (k-1, p) where a picture is black. The colour along the mean is a vector of the
    lattice too, and is taken out of them.
    """
    wanted = len(frame.t) + int(not frame.flat and frame.colour()[0].any())
    distance = np.where((np.rint(vectors) != 0).any(1), distance, np.inf)
    nearest = np.argsort(distance, kind="stable")[:wanted]
    if (distance[nearest] >= INTEGRAL).any():
        return None
    integers = np.rint(vectors[nearest])
    phi, tau = frame.coordinates(integers)
    own, whole = frame.shifted(integers, tau - phi)
    if not whole.all():
        return None
    own = own[(own != 0).any(1)]
    rank = len(frame.t) - frame.black
    if len(own) > rank:  # one relation: it becomes a row of nothing, the shortest
        own = _reduced(own, np.zeros(len(own)))
    if not frame.black:
        phi = frame.coordinates(own)[0]
        if abs(phi - np.rint(phi)).max() > INTEGRAL:  # a picture is a multiple, as a flat one is
            own = _reduced(np.vstack((own, 0 * own[:1])), FAR * np.append(phi, 1))
            own = own[abs(frame.coordinates(own)[0] % 1 - 0.5) > 0.5 - 1e-3]
    return own if len(own) == rank else None


def _reduced(vectors: Reals, also: Reals) -> Reals:
    """Vectors that span the same, with `also` made small by LLL; without rows of nothing."""
    rows = np.hstack((vectors, also[:, None], RELATION * np.eye(len(vectors))))
    vectors = np.rint(lll(rows)[0] @ vectors)
    return vectors[(vectors != 0).any(1)]


def _chosen(frame: Frame, vectors: Reals) -> Reals | None:
    """(k, p) the pictures, from any basis of their combinations; None if none counts as one."""
    starts = (vectors, _shortened(vectors, frame.patch_size))
    ends = []
    for start in starts:
        pictures = _pictures(frame, start)
        if pictures is None:
            return None
        if frame.black:
            pictures = np.vstack((pictures, 0 * pictures[:1]))
        ends.append(_exchanged(frame.cost, _exchanged(frame.sparse, pictures)))
    return min(ends, key=lambda patches: float(frame.cost(patches).sum()))


def _pictures(frame: Frame, vectors: Reals) -> Reals | None:
    """The same lattice by vectors with a . t = 1 alone: others less a multiple of one of these."""
    if frame.black:  # any vector may count as a picture; the sign is the box's
        cost = np.stack((frame.cost(vectors), frame.cost(-vectors)))
        return np.where(cost.argmin(0)[:, None] == 0, vectors, -vectors)
    vectors, phi = vectors.copy(), np.rint(frame.coordinates(vectors)[0])
    if not (abs(phi) == 1).any():  # Euclid's algorithm on two that are not
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
        cost_each = [float(frame.cost(trial).min()) for trial in trials]
        best = int(np.argmin(cost_each))
        row = rest[best // 2]
        vectors[row], phi[row] = trials[best][frame.cost(trials[best]).argmin()], 1
    return vectors


def _with_a_unit(vectors: Reals, phi: Reals) -> tuple[Reals, Reals]:
    vectors, phi = vectors.copy(), phi.copy()
    while not (abs(phi) == 1).any() and (phi != 0).sum() > 1:
        order = np.argsort(np.where(phi == 0, np.inf, abs(phi)), kind="stable")
        small, large = order[0], order[1]
        times = np.rint(phi[large] / phi[small])
        vectors[large] -= times * vectors[small]
        phi[large] -= times * phi[small]
    return vectors, phi
