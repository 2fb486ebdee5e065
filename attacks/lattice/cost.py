"""Costs that say how unlike a photograph a patch is, from a few constants and no images.

Patches are (n, C*P*P) in grey levels, C = 3 or 1; their range 0...255 is called the box. The
constants are the usual power law of photographs, std ~ A f^-1.6 per DCT coefficient of the opponent
colours at f cycles per pixel, rounded, as photographs that are not attacked have it.

A cost is a sum of simple functions of numbers that are affine in the patch (`Parts`): its colour
DCT, the differences of neighbouring pixels, the pixels. Of v + v' - v'' they are the same sum of
three rows, so that thousands of such trials need no matrix product. All trials are first ranked by
every few of these numbers in single precision (`thin`); the whole cost decides among the best.

`Frame` is the model's normalised space in grey levels, with the hull of the masked patches there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.interfaces import Pixels

Reals = NDArray[np.float64]
EXPONENT = -1.6
SPREAD = (10.0, 2.8, 1.1)  # A of the standard deviation, by opponent colour
TYPICAL = (3.3, 0.55, 0.2)  # A of the median magnitude
GREY = 116.0  # mean grey level
LEVEL = 0.3  # grey levels of rounding, added to the typical magnitude
GRADIENT = 0.3  # weight of the gradients' cost
OUTSIDE = 5.0  # cost of a grey level outside the box


@cache
def _basis(length: int, patch_size: int) -> tuple[Reals, Reals, Reals]:
    """Orthonormal colour DCT (p, p), and the std and typical size (p,) of its coefficients."""
    channels = length // patch_size**2
    colours = (
        np.array([[1.0, 1, 1], [1, 0, -1], [-1, 2, -1]]) if channels == 3 else np.eye(channels)
    )
    colours /= np.linalg.norm(colours, axis=1, keepdims=True)
    waves = scipy.fft.dct(np.eye(patch_size), norm="ortho", axis=0)
    basis = np.einsum("cd,ui,vj->cuvdij", colours, waves, waves).reshape(length, length)
    index = np.arange(patch_size)
    frequency = np.hypot(index[:, None], index)
    frequency[0, 0] = 0.7
    law = (frequency / patch_size) ** EXPONENT
    spread = np.multiply.outer(np.resize(SPREAD, channels), law).ravel() + 1
    typical = np.multiply.outer(np.resize(TYPICAL, channels), law).ravel() + LEVEL
    return basis, spread, typical


def precision(length: int, patch_size: int) -> Reals:
    """The inverse covariance (p, p) of a patch in grey levels."""
    basis, spread, _ = _basis(length, patch_size)
    return (basis.T / spread**2) @ basis


# the cost of sums of patches ----------------------------------------------------------------------


Singles = NDArray[np.float32]
Places = NDArray[np.int64]
KEPT = 48  # trials whose whole cost is computed
EVERY_WAVE, EVERY_GRADIENT, EVERY_PIXEL = 6, 9, 8  # of what `thin` holds; it weighs accordingly
LEAST = 0.5  # grey levels: smaller differences weigh no more than one of this size
TOGETHER = 4  # numbers multiplied before their logarithm is taken


@dataclass(frozen=True)
class Border:
    """What a patch must continue: pixels beside it, each with the grey level behind the border."""

    inner: Places  # (b,) pixels of the patch
    beyond: Reals  # (b,) the grey levels that they touch


@dataclass(frozen=True)
class Parts:
    """The numbers whose cost is summed, for patches of `length` = C*P*P pixels.

    waves  whether DCT coefficients count; without them it is the simpler `sparse` cost, in which a
           search gets stuck less often
    """

    length: int
    patch_size: int
    waves: bool = True

    def of(self, vectors: Reals) -> Reals:
        """(n, length) in grey levels -> (n, q): waves, then gradients, then pixels."""
        size = self.patch_size
        tiles = vectors.reshape(len(vectors), -1, size, size)
        rows = [np.diff(tiles, axis=-1), np.diff(tiles, axis=-2)]
        groups = [group.reshape(len(vectors), -1) for group in rows] + [vectors]
        if self.waves:
            basis, _, typical = _basis(self.length, size)
            groups.insert(0, (vectors - GREY) @ (basis.T / typical))
        return np.concatenate(groups, axis=1)

    def cost(self, parts: Reals, border: Border | None = None) -> Reals:
        """The whole cost (n,) of patches from their parts (n, q)."""
        total = self._sum(parts, *self._ends, 1.0, self._weight, OUTSIDE)
        if border is not None:
            steps = parts[:, self._ends[1] + border.inner] - border.beyond
            total = total + _logs(1 + abs(steps))
        return total

    def mean_step(self, parts: Reals) -> Reals:
        """The mean of log(1 + |difference of neighbouring pixels|) (n,), from parts (n, q)."""
        first, second = self._ends
        return _logs(1 + abs(parts[:, first:second])) / (second - first)

    def curvature(self, parts: Reals) -> Reals:
        """Weights (first two groups,) of the quadratic form that touches the cost at parts (q,) and
        is nowhere below it; pixels, which cost nothing inside the box, are left out."""
        first, second = self._ends
        size = abs(parts[first:second])
        steps = 0.5 * self._weight / ((1 + size) * np.maximum(size, LEAST))
        return np.concatenate((1 / (1 + parts[:first] ** 2), steps))

    def thin(self, parts: Reals) -> Singles:
        """The parts (n, s) by which trials are ranked; those beyond all float32 are infinite."""
        with np.errstate(over="ignore"):
            return parts[:, self._columns].astype(np.float32)

    def rank(self, thin: Singles) -> Singles:
        """About the cost (...,) of trials with the thin parts (..., s), which are overwritten."""
        first, second = (int((self._columns < end).sum()) for end in self._ends)
        weights = (EVERY_WAVE, EVERY_GRADIENT * self._weight, EVERY_PIXEL * OUTSIDE)
        return self._sum(thin, first, second, *weights)

    def _sum(
        self,
        parts: NDArray[Any],
        first: int,
        second: int,
        wave: float,
        gradient: float,
        outside: float,
    ) -> NDArray[Any]:
        """The weighted costs of parts (..., q), whose groups end at `first` and `second`."""
        total = gradient * _logs(1 + abs(parts[..., first:second]))
        if first:
            total += wave * _logs(1 + np.square(parts[..., :first]))
        pixels = parts[..., second:]
        beyond = np.maximum(abs(pixels - pixels.dtype.type(127.5)) - 127.5, 0).sum(-1)
        return total + outside * beyond

    @property
    def _weight(self) -> float:
        return GRADIENT if self.waves else 1.0

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """Where the waves end, and where the gradients do."""
        inner = 2 * self.length // self.patch_size * (self.patch_size - 1)
        first = self.length if self.waves else 0
        return first, first + inner

    @cached_property
    def _columns(self) -> Places:
        first, second = self._ends
        ranges = (
            np.arange(0, first, EVERY_WAVE),
            np.arange(first, second, EVERY_GRADIENT),
            np.arange(second, second + self.length, EVERY_PIXEL),
        )
        return np.concatenate(ranges)


def _logs(values: NDArray[Any]) -> NDArray[Any]:
    """The sum of log(values) over the last axis, for values of at least 1."""
    whole = values.shape[-1] // TOGETHER
    product = values[..., :whole]
    for part in range(1, TOGETHER):
        product = product * values[..., part * whole : (part + 1) * whole]
    rest = np.log(values[..., TOGETHER * whole :]).sum(-1)
    return np.log(product).sum(-1) + rest


# short vectors, grey levels, and the hull of the masked patches ----------------------------------


INTEGRAL = 0.05  # grey levels by which entries may miss integers
FLAT = 1e-2  # share of the length of a flat vector outside the space for which it is looked at
CLOSE = 1e4  # weight of that share when the shortest flat vector of whole grey levels is looked for
FINE = 2.0**14  # precision of that search
DELTA = 0.99  # Lovász's condition
HALF = 0.501  # size reduction; a little over 1/2, so that rounding does not make it repeat
SHORTEST = 64.0  # length of the shortest Gram-Schmidt vector in units of rounding; more is slower
TINY = 1e-12  # of the longest one; a shorter one is taken for zero


def lll(rows: Reals, level: float = SHORTEST) -> Reals:
    """A unimodular U (n, n) with U @ rows reduced in the sense of LLL, by FLINT: eight times faster
    than LLL written in Python.

    Rows (n, m >= n) need not be whole: they are rounded after a scaling that gives the shortest
    Gram-Schmidt vector the length `level`.
    """
    from flint import fmpz_mat  # here: this attack alone needs it

    lengths = abs(np.linalg.qr(rows.T)[1].diagonal())
    scaled = np.rint(rows * (level / max(lengths.min(), TINY * lengths.max())))
    matrix = fmpz_mat([[int(entry) for entry in row] for row in scaled])
    transform = matrix.lll(True, DELTA, HALF)[1]
    return np.array([[int(entry) for entry in row] for row in transform.tolist()], dtype=np.float64)


def nearest_plane(triangle: Reals, targets: Reals) -> tuple[Reals, Reals]:
    """The whole times (n, m) of the columns of an upper triangle (n, n) whose sums are near the
    targets (n, m), by Babai (1986), and how far from whole the times of each were at most, (m,)."""
    left, times, doubt = targets.copy(), np.empty_like(targets), np.zeros(targets.shape[1])
    for row in range(len(left) - 1, -1, -1):
        share = left[row] / triangle[row, row]
        times[row] = np.rint(share)
        doubt = np.maximum(doubt, abs(share - times[row]))
        left -= np.outer(triangle[:, row], times[row])
    return times, doubt


@dataclass(frozen=True)
class Frame:
    """Grey levels n = gain x + zero of the model's space, and the hull of the masked patches.

    With one more pixel phi, which is 1 in every patch, the integer combinations of the patches are
    vectors (n, phi) of a lattice: a patch has phi = 1, a difference of two has 0. So nothing in it
    depends on the normalisation, and a black patch is (0, 1).
    """

    gain: Reals  # (p,) 255 std
    zero: Reals  # (p,) 255 mean
    space: Reals  # (k, p + 1): any basis of the span of the masked patches' (n, phi)
    patch_size: int

    @staticmethod
    def of(wide: Tensor, pixels: Pixels, patch_size: int) -> Frame:
        """The frame of `equations.span.hull_rows`, (k, p + 1) in the model's space."""
        area = patch_size**2
        gain = 255 * np.repeat(np.array(pixels.std, dtype=np.float64), area)
        zero = 255 * np.repeat(np.array(pixels.mean, dtype=np.float64), area)
        rows = wide.detach().cpu().double().numpy()
        vectors, phi = rows[:, :-1], rows[:, -1:]
        return Frame(gain, zero, np.hstack((vectors * gain + phi * zero, phi)), patch_size)

    @cached_property
    def colours(self) -> Reals:
        """(f, p) integers, f up to the number of channels: a basis of the flat vectors of phi = 0.

        There are some where flat patches of several colours are masked. What is known but for the
        masked patches' differences then has no level along them.
        """
        area = self.patch_size**2
        channels = len(self.zero) // area
        flat = np.repeat(np.eye(channels), area, axis=1) / np.sqrt(area)
        basis = np.linalg.qr(self.space.T)[0]
        last = basis[-1]
        within = basis[:-1] - np.outer(basis[:-1] @ last, last) / max(last @ last, 1e-300)
        directions, sizes, _ = np.linalg.svd(within, full_matrices=False)
        differences = directions[:, sizes > 0.5]  # phi = 0 takes one direction away
        held = flat @ differences
        inside, shares, _ = np.linalg.svd(held, full_matrices=False)
        free = inside[:, shares**2 > 1 - FLAT**2]  # colours whose flat vectors are in the space
        if not free.shape[1]:
            return np.zeros((0, len(self.zero)))
        outside = np.eye(channels) - free @ free.T
        whole = lll(np.hstack((np.eye(channels), CLOSE * outside)), FINE)
        near = np.argsort(np.linalg.norm(whole @ outside, axis=1), kind="stable")
        colours = np.repeat(whole[near[: free.shape[1]]], area, axis=1)
        beyond = colours - colours @ differences @ differences.T
        return colours[abs(beyond).max(1) < INTEGRAL]  # others are nearly flat

    def levelled(self, vectors: Reals, guess: Reals) -> Reals:
        """Vectors (m, p), shifted by multiples of `colours` to the level of the guess (p,)."""
        if not len(self.colours):
            return vectors
        times = np.linalg.lstsq(self.colours.T, (guess - vectors).T, rcond=None)[0]
        return vectors + np.rint(times).T @ self.colours

    def cost(self, vectors: Reals) -> Reals:
        """How unlike photographs vectors (m, p) in grey levels are, (m,)."""
        return self.parts.cost(self.parts.of(vectors))

    @cached_property
    def parts(self) -> Parts:
        """The parts of patches' cost."""
        return Parts(len(self.zero), self.patch_size)
