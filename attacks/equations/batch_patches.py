r"""The patches of a batch's pictures, position by position: integer vectors near each other.

Off the span S of their differences the patches of one position are known and equal, C_i
(`equations.batch_span`). Pixels are integers, so the differences of all positions generate a
lattice of rank N (B - 1) (`lattice.unmixing`), and the patches of position i are vectors of one of
its cosets, of which few look like photographs:

    x_{b,i} in C_i + Z d_1 + ... + Z d_q.

In a basis of steps that are short for photographs most steps are differences of the batch's own
pictures. So from the vector nearest to a guess, moved while that looks more like a photograph, all
B patches are a few steps away, and LayerNorm's length tells which (`equations.norm_test`). What is
missing is then looked for with the differences that were found as further steps. Without the test
the patches that look most like photographs are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from attacks.budget import spent
from attacks.equations.norm_test import LatticeTest, NormTest
from attacks.lattice.descent import Moves, short_vectors
from attacks.lattice.frame import Reals
from attacks.lattice.sums import sums_of
from attacks.lattice.unmixing import Unmixed

FURTHEST = 3  # steps between two patches of one position, at most
LOOKS = 3  # at what is missing, with the differences that were found as further steps


@dataclass(frozen=True)
class BatchPatches:
    """A search for the patches of each position."""

    lattice: Unmixed
    steps: Reals  # (q, p) a short basis of the lattice, in grey levels
    moves: Moves
    test: NormTest | None

    @classmethod
    def of(cls, lattice: Unmixed, test: NormTest | None) -> BatchPatches:
        """The search in a lattice of differences (`lattice.unmixing.unmix_differences`)."""
        parts = lattice.frame.parts()
        steps, _ = short_vectors(parts, np.rint(255 * lattice.patches[1:].numpy()))
        moves = Moves.of(lattice.frame, parts, np.vstack((0 * steps[:1], steps)))
        return cls(lattice, steps, moves, test)

    def found(self, known: Tensor, guesses: Sequence[Tensor], batch: int) -> list[Reals]:
        """For each position the patches (m, p) that are found, at most `batch`, in grey levels.

        known    (N, p) normalised: the patches but for multiples of the steps
        guesses  pictures (N, p) in [0, 1] near which to look
        """
        starts = self._starts(known, guesses)
        if self.test is None:
            return [self._likeliest(each, batch) for each in starts]
        near = Neighbours(self.test.along(self.steps), self.steps, FURTHEST)
        found = [near.of(place, each, batch) for place, each in enumerate(starts)]
        for _ in range(LOOKS):
            lacking = [place for place, each in enumerate(found) if len(each) < batch]
            own = [difference for each in found for difference in _between(each)]
            if not lacking or not own or spent():
                break
            steps = _distinct([*self.steps, *own])
            wide = Neighbours(self.test.along(steps), steps, FURTHEST - 1)
            before = sum(map(len, found))
            for place in lacking:
                tried = found[place] if len(found[place]) else starts[place]
                found[place] = wide.of(place, tried, batch)
            if sum(map(len, found)) == before:
                break
        return [self._best(each, batch) for each in found]

    def _starts(self, known: Tensor, guesses: Sequence[Tensor]) -> list[Reals]:
        """For each position (m, p) what looks most like a photograph near the guesses."""
        near = [self.lattice.nearest(known, guess) for guess in guesses]
        starts = []
        for place in range(len(known)):
            own = [
                self._start(255 * vectors[place].numpy(), 255 * guess[place].cpu().double().numpy())
                for guess, (vectors, whole) in zip(guesses, near, strict=True)
                if bool(whole[place])
            ]
            starts.append(_distinct(own) if own else np.zeros((0, known.shape[1])))
        return starts

    def _start(self, vector: Reals, guess: Reals) -> Reals:
        """The patch (p,) that looks most like a photograph near a vector of the coset."""
        return np.rint(self.moves.descended(np.rint(vector), guess))

    def _likeliest(self, starts: Reals, batch: int) -> Reals:
        """The patches that look most like photographs, at most a step away from one of them."""
        best = self._best(starts, 1)
        if not len(best):
            return best
        around = np.vstack((best + self.steps, best - self.steps))
        return np.vstack((best, self._best(_inside(around), batch - 1)))

    def _best(self, patches: Reals, count: int) -> Reals:
        """Those that cost least."""
        if not len(patches):
            return patches
        order = np.argsort(self.lattice.frame.cost(patches), kind="stable")
        return patches[order[:count]]


@dataclass(frozen=True)
class Neighbours:
    """Patches that pass the test and are a few steps from one that is given or found."""

    test: LatticeTest
    steps: Reals  # (r, p)
    furthest: int  # steps, at most

    def of(self, place: int, starts: Reals, batch: int) -> Reals:
        """The patches (m, p) of one position, about `batch`; nearest first."""
        found: list[Reals] = []
        for size in range(self.furthest + 1):
            found = [patch for start in starts for patch in self._passing(place, start, size)]
            if found:
                break
        found = list(_distinct(found)) if found else []
        looked = [0] * len(found)  # the sizes of sums that were tried around each patch
        while len(found) < batch and looked and min(looked) < self.furthest and not spent():
            around = looked.index(min(looked))
            looked[around] += 1
            more = self._passing(place, found[around], looked[around])
            found = list(_distinct([*found, *more]))
            looked += [0] * (len(found) - len(looked))
        return np.stack(found) if found else starts[:0]

    def _passing(self, place: int, start: Reals, size: int) -> Reals:
        """The patches that pass the test and are `size` steps away from a start."""
        rows, signs = sums_of(len(self.steps), size)
        passed = self.test.passed(start, place, rows, signs)
        steps = np.einsum("nk,nkp->np", signs[passed], self.steps[rows[passed]])
        return _inside(start + steps)


def _between(patches: Reals) -> Reals:
    """The differences of every two patches (m, p)."""
    first, second = np.triu_indices(len(patches), 1)
    return np.asarray(patches[first] - patches[second])


def _inside(patches: Reals) -> Reals:
    """Those whose pixels are all within 0...255."""
    return patches[((patches >= 0) & (patches <= 255)).all(1)]


def _distinct(patches: Sequence[Reals]) -> Reals:
    """The different ones (m, p), in the order in which they came."""
    different = {(patch + 0.0).tobytes(): patch for patch in patches}  # -0.0 is 0.0
    return np.stack(list(different.values()))
