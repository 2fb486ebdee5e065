"""Searches integer combinations of patches for those that look like photographs.

Members are patches with their parts (`lattice.cost`). A move replaces a member by an integer
combination of a few members that keeps phi = 1 and the lattice: v by v + v' - v'', or by
v' + v'' - v, where v' and v'' may be the same. All moves of a member are ranked at once, and the
whole cost decides among the best. So single patches are moved while they look more like
photographs, and from all bases of the lattice the one that consists of patches is picked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.budget import spent
from attacks.lattice.cost import (
    GREY,
    INTEGRAL,
    KEPT,
    Border,
    Frame,
    Parts,
    Places,
    Reals,
    Singles,
    lll,
    nearest_plane,
)


@lru_cache(maxsize=8)
def sums_of(steps: int, size: int) -> tuple[Places, Reals]:
    """All sums of `size` of so many steps, with either sign each and with repetitions: rows
    (n, size) and signs (n, size). sums_of(3, 0) is the empty sum, sums_of(3, 1) has six."""
    places = list(combinations_with_replacement(range(steps), size))
    chosen = np.array(places, dtype=np.int64).reshape(len(places), size)
    signs = np.array(list(product((1.0, -1.0), repeat=size))).reshape(2**size, size)
    return np.repeat(chosen, len(signs), axis=0), np.tile(signs, (len(chosen), 1))


# moves of single patches --------------------------------------------------------------------------


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


SWAP, MIRROR = np.array([1.0, 1.0, -1.0]), np.array([-1.0, 1.0, 1.0])


def exchanged(parts: Parts, vectors: Reals) -> Reals:
    """Vectors (m, p), each v replaced by v + v' - v'' or v' + v'' - v while that costs less."""
    count, full = len(vectors), parts.of(vectors)
    if count < 3:
        return vectors.copy()
    members = Members(parts, vectors.copy(), full, parts.thin(full), parts.cost(full))
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
                members.vectors[row] = signs @ members.vectors[terms]
                members.full[row] = parts.of(members.vectors[row][None])[0]  # no rounding piles up
                members.thin[row] = parts.thin(members.full[row][None])[0]
                members.cost[row], changed[row] = cost, step
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


# moves by short combinations ----------------------------------------------------------------------


Group = tuple[Any, Any, Any, float]  # rows first, second and third of the table, and a sign
DEEP = 4  # times that a basis is deepened, at most


@dataclass(frozen=True)
class Moves:
    """All moves of an unmasked patch, which are the same for every patch of a picture.

    They are v' - v'' for masked patches v' and v'', and short combinations of these. Where flat
    vectors are among them, the level is the guess's (`Frame.colours`). In one form, every move is
    sign (first + second - third) of rows of a table that ends with 0.
    """

    frame: Frame
    table: Reals  # (r, p)
    full: Reals  # (r, q) what each row of the table adds to a patch's parts
    terms: Places  # (n, 3)
    signs: Reals  # (n,)
    thin: Singles  # (n, s) what each move adds to a patch's thin parts
    swaps: int  # how many moves, the first ones, are v' - v''

    @staticmethod
    def of(frame: Frame, masked: Reals) -> Moves:
        """The moves of an unmasked patch, by masked patches (k, p) and a short basis of their
        differences."""
        count = len(masked)
        short = short_vectors(frame.parts, masked[1:] - masked[:1])[0]
        table = np.vstack((masked, short, 0 * masked[:1]))
        nothing = len(table) - 1
        swaps = np.nonzero(~np.eye(count, dtype=bool))
        rows = np.arange(count, nothing)
        groups: list[Group] = [
            (swaps[0], nothing, swaps[1], 1.0),
            (rows, nothing, nothing, 1.0),
            (rows, nothing, nothing, -1.0),
        ]
        return Moves._of(frame, table, groups, len(swaps[0]))

    @staticmethod
    def near(frame: Frame, patch: Reals, others: Reals) -> Moves:
        """The moves of one basis patch by combinations of the other ones (m, p) that are short for
        this patch, and by those that are nearest to it, for it and for a mean patch."""
        differences = others[1:] - others[:1]
        short, nearest = short_vectors(frame.parts, differences, patch, at=patch)
        plainly = short_vectors(frame.parts, short, patch)[1]
        table = np.vstack((short, nearest, plainly, 0 * nearest))
        rows, last = np.split(np.arange(len(table) - 1), [len(short)])
        nothing = len(table) - 1
        first, second = (rows[side] for side in np.triu_indices(len(rows), 1))
        groups = [  # one row of the table or two, with either sign each
            *((rows, nothing, nothing, sign) for sign in (1.0, -1.0)),
            *((first, second, nothing, sign) for sign in (1.0, -1.0)),
            *((first, nothing, second, sign) for sign in (1.0, -1.0)),
            (last, nothing, nothing, -1.0),
        ]
        return Moves._of(frame, table, groups, 0)

    @staticmethod
    def _of(frame: Frame, table: Reals, groups: list[Group], swaps: int) -> Moves:
        parts = frame.parts
        full = parts.of(table) - parts.of(table[-1:])
        terms = np.concatenate(
            [np.stack(np.broadcast_arrays(*map(np.atleast_1d, g[:3])), axis=1) for g in groups]
        )
        signs = np.concatenate([np.full(np.size(group[0]), group[3]) for group in groups])
        thin = parts.thin(full)
        added = thin[terms[:, 0]] + thin[terms[:, 1]] - thin[terms[:, 2]]
        added *= signs[:, None].astype(np.float32)
        return Moves(frame, table, full, terms, signs, added, swaps)

    def descended(
        self,
        vector: Reals,
        guess: Reals | None,
        border: Border | None = None,
        member: int | None = None,
    ) -> Reals:
        """The patch v (p,), moved while that costs less. The guess (p,) gives its level where the
        moves leave that open; `border` is what the patch must continue.

        member  the patch's row among the masked ones, if it is one of them: then the lattice stays
                the same only if no move uses it
        """
        allowed = np.ones(len(self.terms), dtype=bool)
        if member is not None:
            allowed[self.swaps :] = False
            allowed &= (self.terms != member).all(1)
        if not allowed.any():
            return vector
        vector, parts = self._levelled(vector[None], guess)[0], self.frame.parts
        own = parts.of(vector[None])
        cost = float(parts.cost(own, border)[0])
        for _ in range(SWEEPS):
            if spent():
                break
            ranks = parts.rank(parts.thin(own) + self.thin)
            ranks[~allowed] = np.inf
            kept = least(ranks, KEPT)
            trial = self._levelled(vector + self._sums(self.table, kept), guess)
            levelled = len(self.frame.colours) > 0 and guess is not None
            full = parts.of(trial) if levelled else own + self._sums(self.full, kept)
            costs = parts.cost(full, border)
            best = int(costs.argmin())
            if not allowed[kept[best]] or costs[best] >= cost - GAIN:
                break
            vector, own, cost = trial[best], full[best : best + 1], float(costs[best])
        return vector

    def _sums(self, table: Reals, moves: Places) -> Reals:
        """The moves' sums of rows of a table."""
        first, second, third = self.terms[moves].T
        return self.signs[moves, None] * (table[first] + table[second] - table[third])

    def _levelled(self, vectors: Reals, guess: Reals | None) -> Reals:
        """Vectors (m, p), at the level of the guess (p,) if there is one."""
        return vectors if guess is None else self.frame.levelled(vectors, guess)


def short_vectors(
    parts: Parts, vectors: Reals, near: Reals | None = None, at: Reals | None = None
) -> tuple[Reals, Reals]:
    """A short basis (m, p) of the lattice of independent vectors (m, p), and the vector (p,) of the
    lattice whose subtraction makes `near` (p,) small by Babai's nearest plane.

    Short and small is in the quadratic form that touches the cost at the patch `at`, or at a mean
    grey one.
    """
    if not len(vectors):
        return vectors, np.zeros(parts.length)
    grey = np.full(parts.length, GREY)
    target, touched = (parts.of((grey if p is None else p)[None])[0] for p in (near, at))
    scale = np.sqrt(parts.curvature(touched))
    rows = (parts.of(vectors) - parts.of(0 * vectors[:1]))[:, : len(scale)] * scale
    orthogonal, triangle = np.linalg.qr(rows.T)
    transform = lll(triangle.T) if len(vectors) > 1 else np.eye(len(vectors))
    rotation, reduced = np.linalg.qr(triangle @ transform.T)
    turned = rotation.T @ (orthogonal.T @ (target[: len(scale)] * scale))
    times, _ = nearest_plane(reduced, turned[:, None])
    basis = np.rint(transform @ vectors)
    return basis, times[:, 0] @ basis


def deepened(frame: Frame, patches: Reals) -> Reals:
    """A basis of patches (m, p), each moved by short combinations of the others while that costs
    less: they lead out of states that no exchange of single patches improves."""
    parts, patches = frame.parts, patches.copy()
    if len(patches) < 3:
        return patches
    for _ in range(DEEP):
        before = patches.copy()
        for row in np.argsort(-parts.cost(parts.of(patches)), kind="stable"):
            if spent():
                return patches
            others = np.delete(patches, row, axis=0)
            moves = Moves.near(frame, patches[row], others)
            patches[row] = moves.descended(patches[row], None)
        if (patches == before).all():
            break
        patches = exchanged(parts, patches)
    return patches


# the basis of patches -----------------------------------------------------------------------------


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
    parts, sparse = frame.parts, replace(frame.parts, waves=False)
    starts, ends = [units], []
    if len(units) > 1:  # one of them made small, and its sums with a short basis of differences
        short, nearest = short_vectors(frame.parts, units[1:] - units[:1], units[0])
        first = units[:1] - nearest
        starts.append(np.vstack((first, first + short)))
    for start in starts:
        ends.append(exchanged(parts, exchanged(sparse, start)))
    best = min(ends, key=lambda patches: float(frame.cost(patches).sum()))
    return deepened(frame, best)


def _unit_basis(frame: Frame, vectors: Reals) -> Reals | None:
    """A basis (k, p) of the same lattice in which every vector has phi = 1, as patches have: from
    the others the multiple of such a vector is subtracted that gives the least cost."""
    sparse = replace(frame.parts, waves=False)
    vectors, phi = vectors[:, :-1].copy(), vectors[:, -1].copy()
    while not (abs(phi) == 1).any():  # Euclid's algorithm, which tries to make one phi 1 or -1
        if (phi != 0).sum() < 2:
            return None
        order = np.argsort(np.where(phi == 0, np.inf, abs(phi)), kind="stable")
        small, large = order[:2]
        times = np.rint(phi[large] / phi[small])
        vectors[large] -= times * vectors[small]
        phi[large] -= times * phi[small]
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
