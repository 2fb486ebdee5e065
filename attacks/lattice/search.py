"""Searches integer combinations of patches for those that look like photographs.

Members are patches with their parts (`lattice.parts`). A move replaces a member by an integer
combination of a few members that keeps phi = 1 and the lattice: v by v + v' - v'', or by
v' + v'' - v, where v' and v'' may be the same. All moves of a member are ranked at once, and the
whole cost decides among the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.budget import spent
from attacks.lattice.frame import Reals
from attacks.lattice.parts import KEPT, Parts, Places, Singles

SWEEPS = 30  # at most
GAIN = 1e-3  # a move must lower the cost by so much


@dataclass
class Members:
    """Vectors that a search changes, with what is computed once for each of them."""

    parts: Parts
    vectors: Reals  # (m, p) integers
    full: Reals  # (m, q)
    thin: Singles  # (m, s)
    cost: Reals  # (m,)

    @staticmethod
    def of(parts: Parts, vectors: Reals) -> Members:
        """Members with these vectors (m, p)."""
        full = parts.of(vectors)
        return Members(parts, vectors.copy(), full, parts.thin(full), parts.cost(full))

    def replace(self, row: int, terms: Places, signs: Reals, cost: float) -> None:
        """Replace a member by the combination of members `terms` with these signs."""
        self.vectors[row] = signs @ self.vectors[terms]
        self.full[row] = self.parts.of(self.vectors[row][None])[0]  # afresh: no rounding piles up
        self.thin[row] = self.parts.thin(self.full[row][None])[0]
        self.cost[row] = cost


SWAP, MIRROR = np.array([1.0, 1.0, -1.0]), np.array([-1.0, 1.0, 1.0])


def exchanged(parts: Parts, vectors: Reals) -> Reals:
    """Vectors (m, p), each v replaced by v + v' - v'' or v' + v'' - v while that costs less."""
    members = Members.of(parts, vectors)
    count = len(vectors)
    if count < 3:
        return vectors.copy()
    changed = np.zeros(count, dtype=np.int64)  # the step in which each member changed last
    seen = np.full(count, -1)  # the step in which all moves of a member had been tried
    step = 0
    for _ in range(SWEEPS):
        before = step
        for row in np.argsort(-members.cost, kind="stable"):
            fresh = changed > seen[row]
            if not fresh.any():
                continue
            if spent():
                return members.vectors
            terms, signs, cost = _best_move(members, int(row), fresh)
            seen[row] = step
            if cost < members.cost[row] - GAIN:
                step += 1
                members.replace(int(row), terms, signs, cost)
                changed[row] = step
        if step == before:
            break
    return members.vectors


def _best_move(members: Members, row: int, fresh: NDArray[np.bool_]) -> tuple[Places, Reals, float]:
    """The move of a member that costs least, as terms, signs and cost.

    fresh (m,) are the members that changed since its moves were last tried; moves without one of
    them need not be tried again.
    """
    others = np.delete(np.arange(len(members.vectors)), row)
    some = others if fresh[row] else others[fresh[others]]
    thin, own = members.thin, members.thin[row]
    rank = members.parts.rank
    added = rank((own + thin[some])[:, None] - thin[others])  # own + some - others
    mirrored = rank((thin[some] - own)[:, None] + thin[others])
    same = some[:, None] == others
    added[same] = np.inf
    mirrored[fresh[row] & (some[:, None] > others)] = np.inf  # the same pairs once more
    groups = [added, mirrored]
    if not fresh[row]:
        taken = rank((own - thin[some])[:, None] + thin[others])  # own + others - some
        taken[same] = np.inf
        groups.append(taken)
    ranks = np.concatenate([group.ravel() for group in groups])
    kept = least(ranks, KEPT)
    kind, pair = np.divmod(kept, added.size)
    first, second = some[pair // len(others)], others[pair % len(others)]
    first, second = np.where(kind == 2, second, first), np.where(kind == 2, first, second)
    signs = np.where((kind == 1)[:, None], MIRROR, SWAP)
    full = members.full
    trial = signs[:, :1] * full[row] + signs[:, 1:2] * full[first] + signs[:, 2:] * full[second]
    cost = members.parts.cost(trial)
    best = int(cost.argmin())
    return np.array([row, first[best], second[best]]), signs[best], float(cost[best])


def least(ranks: Singles, count: int) -> Places:
    """The places of the least finite ranks, at most `count`, in ascending order of place."""
    if len(ranks) > count:
        kept = np.sort(np.argpartition(ranks, count - 1)[:count])
    else:
        kept = np.arange(len(ranks))
    finite = kept[np.isfinite(ranks[kept])]
    return finite if len(finite) else kept[:1]
