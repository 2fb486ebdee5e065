r"""The patches behind a span: what MJP's masked positions hold, exact, up to their order.

By linear algebra one upload gives the masked patches only as a span: with Q an orthonormal basis
of the unmasked rows of `pos_embed.grad`, H = (I - QQ^T) G = A_M^T X_M, whose row space B (k, p) is
the span of the masked patches X_M. Two facts finish it.

1. `unk_embed.grad` is the sum of the masked rows, A_M^T 1. So t = lstsq(H B^T, (I - QQ^T) sum)
   has a . t = 1 for the coordinates a of every masked patch (x = a B): scale and sign are known.
2. Pixels are 8-bit: n = 255 (std x + mean) is a vector of integers. The integer vectors of the
   span form a lattice whose basis are the masked patches (`attacks.lattice`), and among its bases
   the patches are the one that looks like photographs (`attacks.patch_cost`): inside 0...255,
   smooth, with a . t = 1.

The same lattice completes an unmasked patch, which linear algebra gives except for its part in the
span: the integer vectors of c + span are the patch plus combinations of the masked ones.

Needs: pixels that are multiples of 1/255 when the client normalises them (no resampling, mixing or
noise after the rounding), and gradients so exact that the span is known to a small fraction of a
grey level (float32 is). FastICA on the same span, which needs no integers, recovers nothing usable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.lattice import FIRST, STEP, SpanLattice, lll, order_of_pixels, span_lattice
from attacks.patch_cost import GREY, OUTSIDE, gradient_cost, outside, patch_cost, precision

Reals = NDArray[np.float64]
NOISE = 1e-4  # grey levels; a larger one asks for more pixels, a smaller one is paid in length
INTEGRAL = 0.05  # grey levels from integers, over all pixels
PIXELS = 150  # further pixels before giving up, at least
SWEEPS = 30
THINNED, KEPT = 7, 400  # every so many pixels; sums kept by what is seen of them
FEW = 50  # trials looked at, though they leave the box
FLAT = 1e-3  # of the mean's length: a constant is in the span
RELATION = 1e-3  # weight of a combination's own length
FAR = 1e7
LARGEST = 1024  # for a colour along the mean


@dataclass(frozen=True)
class Frame:
    """Grey levels of the model's space: n = gain x + zero, and the span in them."""

    gain: Reals  # (p,) 255 std
    zero: Reals  # (p,) 255 mean
    space: Reals  # (k+1, p): gain B, then zero; without it where zero is in the span
    t: Reals  # (k,)
    patch_size: int

    @staticmethod
    def of(
        basis: Tensor, t: Tensor, mean: Sequence[float], std: Sequence[float], patch_size: int
    ) -> Frame:
        area = patch_size**2
        gain = 255 * np.repeat(np.array(std, dtype=np.float64), area)
        zero = 255 * np.repeat(np.array(mean, dtype=np.float64), area)
        scaled = basis.detach().cpu().double().numpy() * gain
        sums = t.detach().cpu().double().numpy()
        inside = np.linalg.lstsq(scaled.T, zero, rcond=None)[0]
        if np.linalg.norm(zero - inside @ scaled) > FLAT * np.linalg.norm(zero):
            return Frame(gain, zero, np.vstack((scaled, zero)), sums, patch_size)
        # A flat patch (saturated, say) is masked: a constant is a combination of the patches.
        scale = 1 + inside @ sums
        if abs(scale) < FLAT:  # that patch is black: 0 times anything
            return Frame(gain, zero, scaled, sums, patch_size)
        return Frame(gain, zero, scaled, sums / scale, patch_size)

    @property
    def flat(self) -> bool:
        """A constant is in the span."""
        return len(self.space) == len(self.t)

    @property
    def black(self) -> bool:
        """One of the patches is zero, and a . t = 1 says nothing."""
        if not self.flat:
            return False
        inside = np.linalg.lstsq(self.space.T, self.zero, rcond=None)[0]
        return bool(abs(1 + inside @ self.t) < FLAT)

    def coordinates(self, vectors: Reals) -> tuple[Reals, Reals]:
        """a . t and tau of vectors (m, p) of the space: equal for combinations of pictures."""
        found = np.linalg.lstsq(self.space.T, vectors.T, rcond=None)[0].T.astype(np.float64)
        phi = found[:, : len(self.t)] @ self.t
        if self.flat:
            return phi, np.zeros_like(phi) if self.black else phi
        return phi, found[:, -1]

    def colour(self) -> tuple[Reals, float]:
        """The smallest vector of integers along `zero`, and its tau: it is in the lattice too.

        A grey level everywhere where the channels' means are equal.
        """
        for times in range(1, LARGEST):
            colour = times * self.zero / self.zero[0]
            if abs(colour - np.rint(colour)).max() < 1e-6:
                return np.rint(colour), times / self.zero[0]
        return np.zeros_like(self.zero), np.inf

    def shifted(self, vectors: Reals, tau: Reals) -> tuple[Reals, NDArray[np.bool_]]:
        """Vectors (m, p) less (m,) tau * zero, and where that is a shift by whole grey levels."""
        colour, unit = self.colour()
        times = tau / unit
        whole = abs(times - np.rint(times)) < INTEGRAL if colour.any() else abs(tau) < INTEGRAL
        return vectors - np.multiply.outer(np.rint(times), colour), whole

    def cost(self, vectors: Reals) -> Reals:
        return patch_cost(vectors, self.patch_size)

    def sparse(self, vectors: Reals) -> Reals:
        """A cost with fewer ways to get stuck: sparse gradients and the box."""
        return gradient_cost(vectors, self.patch_size) + OUTSIDE * outside(vectors)


@dataclass(frozen=True)
class Unmixed:
    """The masked patches, and what completes the others."""

    patches: Tensor  # (k, p) in [0, 1], multiples of 1/255, in no order; equal ones once
    frame: Frame
    lattice: SpanLattice

    def complete(self, partial: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Unmasked patches known but for their part in the span -> (m, p) in [0, 1], and (m,) bool.

        partial (m, p) is in the model's space, any vector of patch + span; guess (m, p) in [0, 1]
        is where to look first. Where the bool is False, no integer vector was found and the row is
        not to be used.
        """
        frame, masked = self.frame, np.rint(self.patches.numpy() * 255)
        points = partial.detach().cpu().double().numpy() * frame.gain + frame.zero
        centre = np.full_like(points, GREY)
        if guess is not None:
            centre = guess.detach().cpu().double().numpy() * 255
        found = self.lattice.nearest(points, centre)
        whole = abs(found - np.rint(found)).max(1) < INTEGRAL
        surplus = np.zeros(len(points))
        if not frame.flat:
            surplus = np.linalg.lstsq(frame.space.T, (found - points).T, rcond=None)[0][-1]
        for row in np.flatnonzero(whole):
            start = _in_frame(frame, np.rint(found[row]), surplus[row], masked)
            whole[row] = start is not None
            if start is not None:
                found[row] = _descended(frame, start, masked, centre[row])
        return torch.from_numpy(found / 255), torch.from_numpy(whole)


def sum_coordinates(projected: Tensor, basis: Tensor, unknown: Tensor) -> Tensor:
    """t (k,) with a . t = 1 for every masked patch x = a @ basis.

    projected (D, p) is H, basis (k, p) orthonormal rows, unknown (D,) the projected sum of rows.
    """
    mixed = (projected @ basis.mT).double()
    return torch.linalg.lstsq(mixed, unknown.double().unsqueeze(-1)).solution.squeeze(-1)


def unmix(
    basis: Tensor,
    t: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    patch_size: int,
    noise: float = NOISE,
) -> Unmixed | None:
    """The masked patches from their span: basis (k, p) in the model's space, and t.

    None where no lattice of k integer vectors shows itself: the pixels are no multiples of 1/255,
    the span is not exact enough, or there are too few pixels for so many patches.
    """
    frame = Frame.of(basis, t, mean, std, patch_size)
    metric = precision(basis.shape[1], patch_size)
    lattice = span_lattice(frame.space, metric, noise)
    size = len(basis)
    waiting = order_of_pixels(lattice)[: max(PIXELS, 2 * size)]
    step = max(FIRST, size)
    while len(waiting):
        lattice, waiting = lattice.extended(waiting[:step]), waiting[step:]
        step = max(STEP, size // 6)
        vectors, distance = lattice.vectors()
        own = _combinations(frame, vectors, distance)
        if own is not None:
            patches = _chosen(frame, own)
            if patches is not None:
                return Unmixed(torch.from_numpy(patches / 255), frame, lattice)
    return None


# which basis of the lattice -----------------------------------------------------------------------


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


# unmasked patches ---------------------------------------------------------------------------------


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
