"""Moves a patch by masked patches while that looks more like a photograph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks.budget import spent
from attacks.lattice.cost import GREY
from attacks.lattice.frame import Frame, Reals
from attacks.lattice.parts import KEPT, Border, Parts, Places, Singles
from attacks.lattice.reduction import lll
from attacks.lattice.search import GAIN, SWEEPS, exchanged, least

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
    parts: Parts
    table: Reals  # (r, p)
    full: Reals  # (r, q) what each row of the table adds to a patch's parts
    terms: Places  # (n, 3)
    signs: Reals  # (n,)
    thin: Singles  # (n, s) what each move adds to a patch's thin parts
    swaps: int  # how many moves, the first ones, are v' - v''

    @staticmethod
    def of(frame: Frame, parts: Parts, masked: Reals) -> Moves:
        """The moves of an unmasked patch, by masked patches (k, p) and a short basis of their
        differences."""
        count = len(masked)
        short = short_vectors(parts, masked[1:] - masked[:1])[0]
        table = np.vstack((masked, short, 0 * masked[:1]))
        nothing = len(table) - 1
        swaps = np.nonzero(~np.eye(count, dtype=bool))
        rows = np.arange(count, nothing)
        groups: list[Group] = [
            (swaps[0], nothing, swaps[1], 1.0),
            (rows, nothing, nothing, 1.0),
            (rows, nothing, nothing, -1.0),
        ]
        return Moves._of(frame, parts, table, groups, len(swaps[0]))

    @staticmethod
    def near(frame: Frame, parts: Parts, patch: Reals, others: Reals) -> Moves:
        """The moves of one basis patch by combinations of the other ones (m, p) that are short for
        this patch, and by those that are nearest to it, for it and for a mean patch."""
        differences = others[1:] - others[:1]
        short, nearest = short_vectors(parts, differences, patch, at=patch)
        plainly = short_vectors(parts, short, patch)[1]
        table = np.vstack((short, nearest, plainly, 0 * nearest))
        rows, last = np.split(np.arange(len(table) - 1), [len(short)])
        groups = [
            *_signed_pairs(rows, len(table) - 1),
            (last, len(table) - 1, len(table) - 1, -1.0),
        ]
        return Moves._of(frame, parts, table, groups, 0)

    @staticmethod
    def _of(frame: Frame, parts: Parts, table: Reals, groups: list[Group], swaps: int) -> Moves:
        full = parts.of(table) - parts.of(table[-1:])
        terms = np.concatenate(
            [np.stack(np.broadcast_arrays(*map(np.atleast_1d, g[:3])), axis=1) for g in groups]
        )
        signs = np.concatenate([np.full(np.size(group[0]), group[3]) for group in groups])
        thin = parts.thin(full)
        added = thin[terms[:, 0]] + thin[terms[:, 1]] - thin[terms[:, 2]]
        added *= signs[:, None].astype(np.float32)
        return Moves(frame, parts, table, full, terms, signs, added, swaps)

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
        vector = self._levelled(vector[None], guess)[0]
        own = self.parts.of(vector[None])
        cost = float(self.parts.cost(own, border)[0])
        for _ in range(SWEEPS):
            if spent():
                break
            ranks = self.parts.rank(self.parts.thin(own) + self.thin)
            ranks[~allowed] = np.inf
            kept = least(ranks, KEPT)
            trial = self._levelled(vector + self._sums(self.table, kept), guess)
            levelled = len(self.frame.colours) > 0 and guess is not None
            full = self.parts.of(trial) if levelled else own + self._sums(self.full, kept)
            costs = self.parts.cost(full, border)
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
    remainder = rotation.T @ (orthogonal.T @ (target[: len(scale)] * scale))
    times = np.zeros(len(vectors))
    for row in range(len(vectors) - 1, -1, -1):
        times[row] = np.rint(remainder[row] / reduced[row, row])
        remainder -= times[row] * reduced[:, row]
    basis = np.rint(transform @ vectors)
    return basis, times @ basis


def _signed_pairs(rows: Places, nothing: int) -> list[Group]:
    """The moves by one row of the table or by two, with either sign each."""
    first, second = (rows[side] for side in np.triu_indices(len(rows), 1))
    return [
        *((rows, nothing, nothing, sign) for sign in (1.0, -1.0)),
        *((first, second, nothing, sign) for sign in (1.0, -1.0)),
        *((first, nothing, second, sign) for sign in (1.0, -1.0)),
    ]


def evened(parts: Parts, patches: Reals) -> Reals:
    """Another basis (m, p) of the lattice of patches, with phi = 1 too: one of them made small,
    and its sums with a short basis of their differences."""
    if len(patches) < 2:
        return patches
    differences = patches[1:] - patches[:1]
    short, nearest = short_vectors(parts, differences, patches[0])
    first = patches[:1] - nearest
    return np.vstack((first, first + short))


def deepened(frame: Frame, patches: Reals) -> Reals:
    """A basis of patches (m, p), each moved by short combinations of the others while that costs
    less: they lead out of states that no exchange of single patches improves."""
    parts, patches = frame.parts(), patches.copy()
    if len(patches) < 3:
        return patches
    for _ in range(DEEP):
        before = patches.copy()
        for row in np.argsort(-parts.cost(parts.of(patches)), kind="stable"):
            if spent():
                return patches
            others = np.delete(patches, row, axis=0)
            moves = Moves.near(frame, parts, patches[row], others)
            patches[row] = moves.descended(patches[row], None)
        if (patches == before).all():
            break
        patches = exchanged(parts, patches)
    return patches
