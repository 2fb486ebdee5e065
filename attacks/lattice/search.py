"""Integer combinations of patches tried in turn, towards those that look like photographs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attacks.lattice.cost import gradient_cost, outside
from attacks.lattice.frame import Frame, Reals

SWEEPS = 30


THINNED, KEPT = 7, 400  # every so many pixels; sums kept by what is seen of them


FEW = 50  # trials looked at, though they leave the box


def _shortened(vectors: Reals, patch_size: int) -> Reals:
    """Each replaced by its sum or difference with another while that has sparser gradients."""
    if len(vectors) < 2:
        return vectors
    vectors, cost = vectors.copy(), gradient_cost(vectors, patch_size)
    for _ in range(SWEEPS):
        before = cost.sum()
        for row in np.argsort(-cost, kind="stable"):
            others = np.delete(vectors, row, axis=0)
            trial = np.concatenate((vectors[row] + others, vectors[row] - others))
            found = gradient_cost(trial, patch_size)
            if found.min() < cost[row] - 1e-6:
                vectors[row], cost[row] = trial[found.argmin()], found.min()
        if cost.sum() >= before:
            break
    return vectors


def _exchanged(cost_of: Callable[[Reals], Reals], vectors: Reals) -> Reals:
    """Each v replaced by v + v' - v'' or v' + v'' - v while that looks more like a photograph."""
    vectors, cost = vectors.copy(), cost_of(vectors)
    for _ in range(SWEEPS):
        before = cost.sum()
        for row in np.argsort(-cost, kind="stable"):
            others = np.delete(vectors, row, axis=0)
            one, other = np.triu_indices(len(others), 1)
            mirrored = others[one] + others[other] - vectors[row]
            trial = np.concatenate((_all_moved(vectors[row], others), mirrored))
            best, found = _best(cost_of, trial, vectors[row])
            if found < cost[row] - 1e-3:
                vectors[row], cost[row] = best, found
        if cost.sum() >= before:
            break
    return vectors


def _all_moved(vector: Reals, others: Reals) -> Reals:
    """(., p) vector + v' - v'' for all pairs."""
    return (vector + others[:, None] - others[None]).reshape(-1, len(vector))


def _moved(vector: Reals, others: Reals) -> Reals:
    """(., p) vector + v' - v'' for all pairs, without those that clearly leave the box."""
    one, other = np.nonzero(~np.eye(len(others), dtype=bool))
    return _inside(others[one], -others[other], vector[None])


def _inside(one: Reals, other: Reals, third: Reals) -> Reals:
    """The KEPT sums of three (m or 1, p) that leave the box least, seen on a few pixels."""
    few = slice(None, None, THINNED)
    beyond = outside(one[:, few] + other[:, few] + third[:, few])
    kept = np.argsort(beyond, kind="stable")[:KEPT]
    place = (part[kept] if len(part) > 1 else part for part in (one, other, third))
    return np.add.reduce(list(np.broadcast_arrays(*place)))


def _best(cost_of: Callable[[Reals], Reals], trial: Reals, now: Reals) -> tuple[Reals, float]:
    """The likeliest of the trials that leave the box least."""
    beyond = outside(trial)
    trial = trial[beyond <= max(float(outside(now[None])[0]) + 1, np.sort(beyond)[:FEW][-1:].sum())]
    if not len(trial):
        return now, np.inf
    cost = cost_of(trial)
    return trial[cost.argmin()], float(cost.min())


def _in_frame(frame: Frame, vector: Reals, surplus: float, masked: Reals) -> Reals | None:
    """The vector less what it holds of `zero`, by way of constants and whole pictures."""
    if frame.flat:
        return vector
    trials = []
    for times in (0, 1, -1, 2, -2):
        trial, whole = frame.shifted(vector - times * masked, np.full(len(masked), surplus - times))
        trials.append(trial[whole])
    found = np.concatenate(trials)
    return found[frame.cost(found).argmin()] if len(found) else None


def _descended(frame: Frame, vector: Reals, masked: Reals, guess: Reals) -> Reals:
    """v + v' - v'' with masked patches v', v'' while that looks more like a photograph.

    Also v' + v'' - 2 zero either way, which has whole grey levels where 2 zero has. With a constant
    in the span a patch's own level is not determined: one masked patch is a move, the level the
    guess's.
    """
    one, other = np.triu_indices(len(masked))
    moves = masked[one] + masked[other] - np.rint(2 * frame.zero)
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
        best, found = _best(frame.cost, trial, vector)
        if found >= cost - 1e-3:
            break
        vector, cost = best, found
    return vector


def _levelled(frame: Frame, vectors: Reals, guess: Reals) -> Reals:
    colour = frame.colour()[0]
    if not colour.any():  # no shift by whole grey levels exists
        return vectors
    times = np.rint((guess - vectors) @ colour / (colour @ colour))
    return vectors + np.multiply.outer(times, colour)
