r"""The patches behind a span: what MJP's masked positions hold, exactly but in no order.

By linear algebra one upload gives the masked patches only as a span: with Q an orthonormal basis
of the unmasked rows of `pos_embed.grad`, H = (I - QQ^T) G = A_M^T X_M, whose row space is the span
of the masked patches X_M. Two facts lead from the span to the patches.

1. `unk_embed.grad` is the sum of the masked rows, A_M^T 1. Beside H it is one more pixel phi,
   which is 1 in every patch: scale and sign are known, and so is what patches differ by.
2. Pixels are 8-bit: n = 255 (std x + mean) is a vector of integers. The integer vectors (n, phi) of
   that span form a lattice (`SpanLattice`) of which the masked patches are a basis, namely the one
   that looks like photographs (`lattice.cost`): inside 0...255, smooth, with phi = 1.

The same lattice completes an unmasked patch, which linear algebra gives except for the masked
patches' differences: the integer vectors with phi = 1 are the patch plus combinations of these.
Equal patches are one vector. Flat patches of several colours are combinations of one another, so
that the lattice is finer than what they generate, and levels along it stay open (`Frame.colours`).
In their places, patches must continue their neighbours (`continued`), which tells where a patch's
own cost prefers a wrong one.

The lattice is found by LLL (Lenstra, Lenstra, Lovász 1982). With r pivot pixels every vector of the
space is v = v_pivot R, and for integer vectors of the space both v_pivot and, at each further pixel
c, v_pivot R_c are integers up to the noise. So they are short vectors of the lattice spanned by

    [ W  R_c / noise ]        W W^T: squared length of R's rows in a given metric,
    [ 0    I / noise ]

and once enough pixels c are included, they are the only short ones.

It needs pixels that are multiples of 1/255 when the client normalises them (no resampling, mixing
or noise after the rounding), and gradients so exact that the span is known to a small fraction of
a grey level (float32 is enough).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.budget import spent
from attacks.lattice.cost import (
    Border,
    Frame,
    Parts,
    Places,
    Reals,
    lll,
    nearest_plane,
    precision,
)
from attacks.lattice.search import Moves, combination_basis, patch_basis
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import Grid

FIRST, STEP = 24, 6  # further pixels included at the beginning and in each round


@dataclass(frozen=True)
class SpanLattice:
    """A reduced basis of the vectors of a space that are integers at some of the pixels."""

    full: Reals  # (r, p) the space by its pivots: v = v[pivots] @ full
    pivots: NDArray[np.int64]  # (r,)
    pixels: NDArray[np.int64]  # (c,) the further pixels included so far
    members: Reals  # (s, r + c) integers: v at the pivots, then the integers nearest v at `pixels`
    metric: Reals  # (p, p) symmetric: what counts as short
    noise: float  # grey levels that the space may be off: the unit of distances from integers

    def vectors(self) -> tuple[Reals, Reals]:
        """The reduced basis (s, p), not rounded, and each vector's distance (s,) from integers."""
        vectors = self.members[:, : len(self.pivots)] @ self.full
        return vectors, abs(vectors - np.rint(vectors)).max(1)

    def missed(self, count: int) -> NDArray[np.int64]:
        """The pixels not included yet, first those at which the shortest `count` vectors of the
        reduced basis miss integers most. In a flat picture few pixels tell patches apart."""
        vectors = self.members[:count, : len(self.pivots)] @ self.full
        misfit = abs(vectors - np.rint(vectors))
        rest = order_of_pixels(self)
        taken = np.isin(rest, self.pixels)
        rank = np.argsort(-misfit[:, rest], axis=1, kind="stable").argsort(1).min(0)
        return rest[~taken][np.argsort(rank[~taken], kind="stable")]

    def rows(self) -> Reals:
        """What LLL shortens (s, r + c): each member's length, and its distance from integers."""
        at_pivots, near = np.split(self.members, [len(self.pivots)], axis=1)
        misfit = at_pivots @ self.full[:, self.pixels] - near
        return np.hstack((at_pivots @ self._root(), misfit / self.noise))

    def _root(self) -> Reals:
        """W (r, r): v[pivots] W has the length of v in the metric."""
        gram = self.full @ self.metric @ self.full.T
        return np.linalg.cholesky(gram + 1e-12 * np.trace(gram) * np.eye(len(gram)))

    def extended(self, pixels: NDArray[np.int64]) -> SpanLattice:
        """The lattice with further pixels included, reduced again."""
        near = np.rint(self.members[:, : len(self.pivots)] @ self.full[:, pixels])
        old = np.hstack((self.members, near))
        new = np.eye(len(pixels), old.shape[1], old.shape[1] - len(pixels))
        included = np.concatenate((self.pixels, pixels))
        larger = replace(self, pixels=included, members=np.vstack((old, new)))
        return replace(larger, members=np.rint(lll(larger.rows()) @ larger.members))

    def nearest(self, points: Reals, centre: Reals) -> Reals:
        """Integer vectors of points (m, p) + space near `centre`, by Babai's nearest plane."""
        at_zero = points - points[:, self.pivots] @ self.full  # zero at the pivots
        root = self._root()
        pull = (centre - at_zero) @ self.metric @ self.full.T
        target = np.hstack((np.linalg.solve(root, pull.T).T, -at_zero[:, self.pixels] / self.noise))
        orthogonal, triangle = np.linalg.qr(self.rows().T)  # rows = triangle^T orthogonal^T
        times, _ = nearest_plane(triangle, (target @ orthogonal).T)
        combination = times.T @ self.members
        return at_zero + combination[:, : len(self.pivots)] @ self.full


def order_of_pixels(lattice: SpanLattice) -> NDArray[np.int64]:
    """All pixels but the pivots, in a seeded random order that does not depend on the picture."""
    rest = np.setdiff1d(np.arange(lattice.full.shape[1]), lattice.pivots)
    return np.random.default_rng(derive_seed("span lattice", len(rest))).permutation(rest)


# patches in their places --------------------------------------------------------------------------


PATIENCE = 48  # unmoved patches in a row after which a round ends
ROUNDS = 4  # at most


FIXED, FREE = -2, -1  # a patch that must stay; an unmasked one, which any move may change


def continued(frame: Frame, masked: Reals, patches: Reals, members: Places, grid: Grid) -> Reals:
    """Patches (N, p) in grey levels, moved while that costs less together with the
    steps across their borders; those with the largest steps first.

    masked   (k, p) the masked patches
    members  (N,) which of them each patch is, or FREE or FIXED
    """
    patches, masked = patches.copy(), masked.copy()
    moves = Moves.of(frame, masked)
    looked_at: dict[int, bytes] = {}  # the patch and its border
    for _ in range(ROUNDS):
        moved, unmoved = False, 0
        for place in _worst_first(patches, grid, frame.parts):
            border = border_at(patches, place, grid, frame.patch_size)
            member = int(members[place])
            state = patches[place].tobytes() + border.beyond.tobytes()
            if member == FIXED or looked_at.get(place) == state:
                continue
            if spent():
                return patches
            patch = patches[place]
            better = moves.descended(patch, patch, border, None if member == FREE else member)
            looked_at[place] = better.tobytes() + border.beyond.tobytes()
            if (better != patch).any():
                patches[place], moved, unmoved = better, True, 0
                if member != FREE:
                    masked[member] = better
                    moves = Moves.of(frame, masked)
            elif (unmoved := unmoved + 1) == PATIENCE:
                break
        if not moved:
            break
    return patches


def _worst_first(patches: Reals, grid: Grid, parts: Parts) -> list[int]:
    """The places in descending order of how much larger the mean step across the borders is than
    that inside (both as logarithms)."""
    inside = parts.mean_step(parts.of(patches))
    across = []
    for place, patch in enumerate(patches):
        border = border_at(patches, place, grid, parts.patch_size)
        across.append(np.log1p(abs(patch[border.inner] - border.beyond)).mean())
    return [int(place) for place in np.argsort(inside - across, kind="stable")]


def border_at(patches: Reals, place: int, grid: Grid, size: int) -> Border:
    """What the patch at a place must continue: the edges of up to four neighbours."""
    pixels = np.arange(patches.shape[1]).reshape(-1, size, size)
    row, column = divmod(int(place), grid.columns)
    sides = (
        (row > 0, -grid.columns, pixels[:, 0], pixels[:, -1]),
        (row < grid.rows - 1, grid.columns, pixels[:, -1], pixels[:, 0]),
        (column > 0, -1, pixels[:, :, 0], pixels[:, :, -1]),
        (column < grid.columns - 1, 1, pixels[:, :, -1], pixels[:, :, 0]),
    )
    inner: list[Places] = [edge.ravel() for exists, _, edge, _ in sides if exists]
    beyond = [patches[place + step, far.ravel()] for exists, step, _, far in sides if exists]
    return Border(np.concatenate(inner), np.concatenate(beyond))


# from the span to the patches ---------------------------------------------------------------------


NOISES = (2e-5, 1e-4, 5e-4, 2e-3)
"""Grey levels that the span may be off, tried in turn. Smaller ones need fewer pixels; trained ViTs
at 192 pixels are off by 3e-5 to 1e-4 in float32, the package's small ones by up to 2e-3."""

EXTENSIONS = 6  # times that further pixels are included for one of them
COARSE = 1e-4  # the least noise for unmasked patches, which are less exact
SUMMED = 1e-2  # the same for what several uploads determine, which divides by weak eigenvalues
MORE = 0.3  # share of further pixels by which those are completed
ALONE = 1e3  # weight of phi there: only differences, whose phi is 0, are to be added
WHOLE = 0.2  # grey levels by which an unmasked patch may miss integers


@dataclass(frozen=True)
class Unmixed:
    """The masked patches, and the lattice that completes the others."""

    patches: Tensor  # (k, p) in [0, 1], multiples of 1/255, in no order, without repetitions
    frame: Frame
    lattice: SpanLattice

    def complete(self, partial: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        """Unmasked patches known but for their part in the span -> (m, p) in [0, 1], and (m,) bool.

        partial (m, p), in the model's space, is any vector of patch + differences; guess (m, p) in
        [0, 1] is where the search starts. Where the bool is False no integer vector was found, and
        the row must not be used.
        """
        nearest, whole = self._nearest(partial, guess)
        moves = Moves.of(self.frame, np.rint(self.patches.numpy() * 255))
        levels = 255 * guess.detach().cpu().double().numpy()
        for row in np.flatnonzero(whole):
            whole[row] = not spent()
            if whole[row]:
                nearest[row] = moves.descended(np.rint(nearest[row]), levels[row])
        return torch.from_numpy(nearest / 255), torch.from_numpy(whole)

    def nearest(self, partial: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        """The same, without a search: the integer vectors (m, p) nearest to the guess."""
        nearest, whole = self._nearest(partial, guess)
        return torch.from_numpy(np.rint(nearest) / 255), torch.from_numpy(whole)

    def _nearest(self, partial: Tensor, guess: Tensor) -> tuple[Reals, NDArray[np.bool_]]:
        """In grey levels, not rounded, and whether they are integers."""
        points = partial.detach().cpu().double().numpy() * self.frame.gain + self.frame.zero
        centre = 255 * guess.detach().cpu().double().numpy()
        one = np.ones((len(points), 1))
        nearest = self.lattice.nearest(np.hstack((points, one)), np.hstack((centre, one)))
        whole = (abs(nearest - np.rint(nearest)).max(1) < WHOLE) & (np.rint(nearest[:, -1]) == 1)
        return nearest[:, :-1], whole

    def continued(self, patches: Tensor, members: Tensor, grid: Grid) -> Tensor:
        """Patches (N, p) in [0, 1] in their places, improved by what lies beside them; members (N,)
        as in `continued`."""
        grey, masked = (255 * p.detach().cpu().double().numpy() for p in (patches, self.patches))
        loose = members.numpy() != FIXED
        grey[loose] = np.rint(grey[loose])
        better = continued(self.frame, np.rint(masked), grey, members.numpy(), grid)
        return torch.from_numpy(better / 255).to(patches)


def unmix(wide: Tensor, pixels: Pixels, patch_size: int) -> Unmixed | None:
    """The masked patches from their hull, `equations.span.hull_rows` (k, p + 1).

    None where no lattice of k integer vectors is found: the pixels are not multiples of 1/255, the
    span is not exact enough, or there are too few pixels for so many patches.
    """
    frame = Frame.of(wide, pixels, patch_size)
    for combinations, lattice in _lattices(frame, COARSE, MORE):
        patches = patch_basis(frame, combinations)
        if patches is not None:
            return Unmixed(torch.from_numpy(patches / 255), frame, lattice)
    return None


def unmix_differences(
    basis: Tensor, pixels: Pixels, patch_size: int, error: float = SUMMED
) -> Unmixed | None:
    """The lattice of patches that are known but for combinations of `basis` (q, p), in the model's
    space: what several uploads leave open. Its `patches` are black and a basis of the lattice.

    error  grey levels by which what is known of a patch may be off

    None where q integer vectors are not found, as in `unmix`.
    """
    black = torch.zeros(1, basis.shape[1] + 1).to(basis)
    black[0, -1] = 1
    frame = Frame.of(torch.nn.functional.pad(basis, (0, 1)), pixels, patch_size)
    frame = replace(frame, space=np.vstack((frame.space, black.cpu().numpy())))
    for combinations, lattice in _lattices(frame, error, 1.0):
        steps = combinations[combinations[:, :-1].any(1), :-1]
        if len(steps) == len(basis):
            patches = np.vstack((0 * steps[:1], steps))
            return Unmixed(torch.from_numpy(patches / 255), frame, lattice)
    return None


def _lattices(frame: Frame, coarse: float, share: float) -> Iterator[tuple[Reals, SpanLattice]]:
    """Bases (k, p + 1) of the integer vectors of the frame's space, each with the lattice that
    completes unmasked patches, by a `share` of further pixels that are off by at least `coarse`;
    for growing errors of the space."""
    length, size = len(frame.zero), len(frame.space)
    metric = np.pad(precision(length, frame.patch_size), (0, 1))
    metric[-1, -1] = 1.0
    only_differences = metric.copy()
    only_differences[-1, -1] = ALONE**2
    basis = np.linalg.qr(frame.space.T)[0].T
    pivots = scipy.linalg.qr(basis, pivoting=True, mode="r")[1][:size]
    full, nothing = np.linalg.solve(basis[:, pivots], basis), np.zeros(0, dtype=np.int64)
    for noise in NOISES:
        lattice = SpanLattice(full, pivots, nothing, np.eye(size), metric, noise)
        order = order_of_pixels(lattice)
        waiting = np.concatenate((order[order == length], order[order != length]))  # phi first
        step = max(FIRST, size)
        for _ in range(EXTENSIONS):
            if spent():
                return
            lattice = lattice.extended(waiting[:step])
            waiting = lattice.missed(size)
            step = max(STEP, size // 6)
            combinations = combination_basis(frame, *lattice.vectors())
            if combinations is not None:
                more = waiting[: max(STEP, round(share * size))]
                completing = replace(
                    lattice, noise=max(lattice.noise, coarse), metric=only_differences
                )
                yield combinations, completing.extended(more)
            if not len(waiting):
                break
