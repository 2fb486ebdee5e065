r"""Whole numbers of which a linear system knows too little: integer least squares.

Each column x (N,) of a table is Gaussian with a mean of its own and one covariance C, as of N
patches' values of one pixel, given their gradients. Most directions of it are known to a small
fraction of 1, a few hardly at all: where patches outnumber the network's width. But x is whole, and
Z^N has few vectors near the known directions: with R^T R = C^-1, x is the vector of the lattice
spanned by R's columns that is nearest to R mean. LLL shortens that basis once for all columns, and
Babai's nearest plane finds each (Lenstra, Lenstra, Lovász 1982; Babai 1986; Teunissen 1995).

Only some of the N numbers enter the lattice: 24, and five for every two directions that are open.
Where few are open, there may be more, until what is left of the others' spread, once those are
known, is far below 1.
"""

from __future__ import annotations

import numpy as np

from attacks.lattice.cost import Reals, lll, nearest_plane
from mjp_privacy.core.machine import derive_seed

OPEN = 0.5  # standard deviation from which rounding does not tell a direction
LEAST, EACH = 24, 2.5  # numbers in the lattice, and further ones for each direction that is open
FEW, LEFT = 12, 0.03  # open directions with which more numbers cost little; spread of the others
FINE = 2.0**12  # precision of the lattice


def whole_columns(mean: Reals, covariance: Reals) -> tuple[Reals, Reals]:
    """The whole columns (N, p) nearest to means (N, p), whose covariance (N, N) is known up to a
    factor of each column; and (p,) how far each is on the way to another vector, at most: 0 at the
    nearest one, .5 halfway. Of numbers that are not whole, or of too large errors, some of N are
    nearly halfway."""
    count, free = len(mean), int((np.linalg.eigvalsh(covariance) > OPEN**2).sum())
    number = min(count, LEAST + round(EACH * free))
    order = np.random.default_rng(derive_seed("whole columns", count)).permutation(count)
    while True:
        some, rest = np.sort(order[:number]), np.sort(order[number:])
        inner, between = covariance[np.ix_(some, some)], covariance[np.ix_(some, rest)]
        gain = np.linalg.solve(inner, between)
        spread = covariance[rest, rest] - (gain * between).sum(0)
        if free > FEW or spread.max(initial=0) <= LEFT**2:
            break
        number = min(count, 2 * number)
    values = np.empty_like(mean)
    values[some], doubt = _nearest(mean[some], inner)
    if len(rest):
        left = mean[rest] + gain.T @ (values[some] - mean[some])
        values[rest] = np.rint(left)
        doubt = np.maximum(doubt, abs(left - values[rest]).max(0))
    return values, doubt


def _nearest(mean: Reals, covariance: Reals) -> tuple[Reals, Reals]:
    """The same with all numbers in the lattice."""
    sizes, directions = np.linalg.eigh(covariance)
    rows = directions / np.sqrt(sizes)  # row i is what 1 in place i adds
    transform = lll(rows, FINE)
    orthogonal, triangle = np.linalg.qr((transform @ rows).T)
    times, doubt = nearest_plane(triangle, orthogonal.T @ (rows.T @ mean))
    return transform.T @ times, doubt
