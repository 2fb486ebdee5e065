"""Searches integer combinations of patches for those that look like photographs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attacks.lattice.cost import gradient_cost, outside
from attacks.lattice.frame import Frame, Reals

SWEEPS = 30  # at most
THINNED, KEPT = 7, 400  # of many sums the KEPT best by every THINNED-th pixel are looked at
FEW = 50  # trials looked at even if they leave the box


def shortened(vectors: Reals, patch_size: int) -> Reals:
    """Vectors (m, p), each replaced by its sum or difference with another one while that has
    sparser gradients."""
    if len(vectors) < 2:
        return vectors
    vectors, cost = vectors.copy(), gradient_cost(vectors, patch_size)
    for _ in range(SWEEPS):
        before = cost.sum()
        for row in np.argsort(-cost, kind="stable"):
            others = np.delete(vectors, row, axis=0)
            trial = np.concatenate((vectors[row] + others, vectors[row] - others))
            trial_cost = gradient_cost(trial, patch_size)
            if trial_cost.min() < cost[row] - 1e-6:
                vectors[row], cost[row] = trial[trial_cost.argmin()], trial_cost.min()
        if cost.sum() >= before:
            break
    return vectors


def exchanged(cost_of: Callable[[Reals], Reals], vectors: Reals) -> Reals:
    """Vectors (m, p), each v replaced by v + v' - v'' or v' + v'' - v while that costs less.

    Both keep a . t = 1; cost_of gives the cost (n,) of trials (n, p).
    """
    vectors, cost = vectors.copy(), cost_of(vectors)
    for _ in range(SWEEPS):
        before = cost.sum()
        for row in np.argsort(-cost, kind="stable"):
            others = np.delete(vectors, row, axis=0)
            first, second = np.triu_indices(len(others), 1)
            mirrored = others[first] + others[second] - vectors[row]
            trial = np.concatenate((_all_moved(vectors[row], others), mirrored))
            best, best_cost = _best(cost_of, trial, vectors[row])
            if best_cost < cost[row] - 1e-3:
                vectors[row], cost[row] = best, best_cost
        if cost.sum() >= before:
            break
    return vectors


def _all_moved(vector: Reals, others: Reals) -> Reals:
    """vector + v' - v'' for all pairs of others, one row each."""
    return (vector + others[:, None] - others[None]).reshape(-1, len(vector))


def _moved(vector: Reals, others: Reals) -> Reals:
    """vector + v' - v'' for pairs of others, without those that clearly leave the box."""
    added, subtracted = np.nonzero(~np.eye(len(others), dtype=bool))
    return _inside(others[added], -others[subtracted], vector[None])


def _inside(first: Reals, second: Reals, third: Reals) -> Reals:
    """The KEPT sums first + second + third, each (m or 1, p), that leave the box least, judged by a
    few pixels."""
    few = slice(None, None, THINNED)
    beyond = outside(first[:, few] + second[:, few] + third[:, few])
    kept = np.argsort(beyond, kind="stable")[:KEPT]
    terms = (term[kept] if len(term) > 1 else term for term in (first, second, third))
    return np.add.reduce(list(np.broadcast_arrays(*terms)))


def _best(cost_of: Callable[[Reals], Reals], trial: Reals, now: Reals) -> tuple[Reals, float]:
    """The trial of least cost, and that cost, among those that leave the box little more than `now`
    (p,) does, and at least the FEW that leave it least."""
    beyond = outside(trial)
    trial = trial[beyond <= max(float(outside(now[None])[0]) + 1, np.sort(beyond)[:FEW][-1:].sum())]
    if not len(trial):
        return now, np.inf
    cost = cost_of(trial)
    return trial[cost.argmin()], float(cost.min())


def without_surplus(frame: Frame, vector: Reals, surplus: float, masked: Reals) -> Reals | None:
    """The vector (p,) less its surplus of `zero`, or None where integers do not allow that.

    Whole multiples of `frame.colour` and of one masked patch (their tau is 1) are subtracted.
    """
    if frame.flat:
        return vector
    trials = []
    for times in (0, 1, -1, 2, -2):
        trial, whole = frame.shifted(vector - times * masked, np.full(len(masked), surplus - times))
        trials.append(trial[whole])
    allowed = np.concatenate(trials)
    return allowed[frame.cost(allowed).argmin()] if len(allowed) else None


def descended(frame: Frame, vector: Reals, masked: Reals, guess: Reals) -> Reals:
    """A patch v (p,), moved by masked patches while that looks more like a photograph.

    Moves are v' - v'' for masked patches v' and v'' and, where 2 `zero` has whole grey levels,
    v' + v'' - 2 zero either way. With `zero` in the span the patch's level is not determined:
    single masked patches are moves too, and the level is the guess's.
    """
    first, second = np.triu_indices(len(masked))
    moves = masked[first] + masked[second] - np.rint(2 * frame.zero)
    if abs(2 * frame.zero - np.rint(2 * frame.zero)).max() > 1e-6:
        moves = moves[:0]
    if frame.flat:
        moves = np.concatenate((moves, masked))
        vector = _levelled(frame, vector[None], guess)[0]
    cost = float(frame.cost(vector[None])[0])
    for _ in range(SWEEPS):
        swapped = _moved(vector, masked)
        both = np.concatenate((moves, -moves))
        moved = _inside(both, np.zeros_like(both[:1]), vector[None])
        trial = np.concatenate((swapped, moved))
        if frame.flat:
            trial = _levelled(frame, trial, guess)
        best, best_cost = _best(frame.cost, trial, vector)
        if best_cost >= cost - 1e-3:
            break
        vector, cost = best, best_cost
    return vector


def _levelled(frame: Frame, vectors: Reals, guess: Reals) -> Reals:
    """Vectors (m, p), shifted by multiples of `frame.colour` to the level of the guess (p,)."""
    colour = frame.colour()[0]
    if not colour.any():  # no shift by whole grey levels exists
        return vectors
    times = np.rint((guess - vectors) @ colour / (colour @ colour))
    return vectors + np.multiply.outer(times, colour)
