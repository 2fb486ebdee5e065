"""One noisy upload's part of the quadratic that `equations.noisy_span` minimises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.equations.names import PATCH, TABLE
from attacks.equations.patch_system import PatchSystem, error_of
from attacks.equations.span import noise_edge, off_the_visible
from attacks.prior.wiener import TINY, expected_square, noise_variance
from mjp_privacy.interfaces import ClientUpdate

LEAK = 0.02
"""How far below the noise a leak is still removed, see `equations.noisy_span`. On photographs that
appear in no results table larger values, up to .1, help a single upload, but they hurt several
uploads, the more so the less noise there is."""
NOTHING = 1e-12  # share of the norm below which a singular value counts as zero


@dataclass(frozen=True)
class Leak:
    """The directions in which an upload's hidden patches show in G."""

    basis: Tensor  # b (k, p)
    weights: Tensor  # w (k,)
    strengths: Tensor  # (k,) singular values of b in what the visible rows leave of G
    mixed: Tensor  # G b^T (D, k)

    def without(self, patches: Tensor) -> Tensor:
        """Patches (N, p) times P = I - sum_k w_k b_k b_k^T."""
        return patches - (patches @ self.basis.mT * self.weights) @ self.basis


@dataclass(frozen=True)
class RowError:
    """What the recipe and the upload say about the errors on A and G, whatever X is."""

    sent: Tensor  # A as uploaded
    rows: float  # variance of the error on an entry of A
    total: float  # the same of G
    energy: float  # E x^2 of an entry of a patch
    dtype: torch.dtype


@dataclass(frozen=True)
class NoisyUpload:
    """One upload of one picture, whose error is known; float64."""

    rows: Tensor  # A (N, D), hidden rows zero
    total: Tensor  # G P (D, p)
    hidden: Tensor  # (N,)
    precision: float  # 1 / t^2
    inside: float  # 1 / s^2, s the size of a hidden patch outside its span; 0: not used
    leak: Leak
    error: RowError

    @cached_property
    def weight(self) -> Tensor:
        """A A^T / t^2 (N, N)."""
        return self.precision * (self.rows @ self.rows.mT)

    def outside(self, patches: Tensor) -> Tensor:
        """Patches (N, p) times P, which takes out the leak."""
        return self.leak.without(patches)

    def pull(self) -> Tensor:
        """The quadratic's right side, A G P / t^2 (N, p)."""
        return self.precision * (self.rows @ self.total)

    def force(self, patches: Tensor) -> Tensor:
        """The quadratic's matrix applied to X (N, p)."""
        out = self.outside(patches)
        return self.weight @ out + self.inside * torch.where(self.hidden.unsqueeze(1), out, 0.0)

    def with_rows(self, patches: Tensor) -> NoisyUpload:
        """The same with A estimated again, given a guess of X: G = A^T X depends on A too."""
        error, visible = self.error, ~self.hidden
        if not error.rows or not error.total:
            return self
        seen = patches[visible]
        sent_precision = torch.eye(len(seen)).to(seen) / error.rows
        spread = torch.linalg.inv(sent_precision + self.outside(seen) @ seen.mT / error.total)
        rows = torch.zeros_like(self.rows)
        right = error.sent[visible] / error.rows + seen @ self.total.mT / error.total
        rows[visible] = spread @ right
        expected = error.total + float(spread.diagonal().sum()) * error.energy
        variance = _variance(expected, rows, self.total, error)
        return replace(self, rows=rows, precision=1 / variance)

    def without_leak(self, patches: Tensor) -> NoisyUpload:
        """The same with the leak that P misses weighed, given a guess of X.

        The directions b are off by noise over their strengths, so that P does not quite remove the
        hidden patches: of their share C b of G, C diag(1 / strength) times noise is left. Both
        sides of G = A^T X are multiplied by the inverse root of I + C diag(1 / strength^2) C^T.
        """
        leak = self.leak
        if not len(leak.basis):
            return self
        share = leak.mixed - self.rows.mT @ (patches @ leak.basis.mT)
        share = share * leak.weights / leak.strengths
        u, s, _ = torch.linalg.svd(share, full_matrices=False)
        shrink = 1 - (1 + s.square()).rsqrt()
        rows = self.rows - (self.rows @ u * shrink) @ u.mT
        total = self.total - (u * shrink) @ (u.mT @ self.total)
        return replace(self, rows=rows, total=total)


def noisy_upload(
    update: ClientUpdate, system: PatchSystem, index: int, mean: Tensor, covariance: Tensor
) -> NoisyUpload:
    """The upload of the picture at `index`; mean (p,) and covariance (p, p) of a patch."""
    row_error, total_error = (float(error_of(update, name)[index]) for name in (TABLE, PATCH))
    rows, total, hidden = system.rows[index], system.total[index], system.hidden[index]
    energy = expected_square(mean, covariance)
    error = RowError(rows, row_error**2, total_error**2, float(energy.mean()), update.dtype)
    expected = error.total + error.rows * len(rows) * error.energy
    rest, masked = off_the_visible(system, index, total), int(hidden.sum())
    edge = noise_edge(expected**0.5, max(rest.shape[0] - int((~hidden).sum()), 0), rest.shape[1])
    leak = _leak(rest, total, masked, edge)
    outside = leak.without(total)
    variance = _variance(expected, rows, outside, error)
    inside = 0.0
    if masked and len(leak.basis) == masked and leak.strengths[-1] > edge:
        spread = variance * float(leak.strengths.reciprocal().square().mean()) * float(energy.sum())
        inside = 1 / max(spread, TINY)
    return NoisyUpload(rows, outside, hidden, 1 / variance, inside, leak, error)


def _leak(rest: Tensor, total: Tensor, masked: int, edge: float) -> Leak:
    """The strongest `masked` directions of `rest`, what the visible rows leave of G, without those
    whose weight would not be positive. `edge` is the strength that noise alone would reach."""
    _, strengths, basis = torch.linalg.svd(rest, full_matrices=False)
    strengths, basis = strengths[:masked], basis[:masked]
    kept = strengths > max(LEAK**0.5 * edge, float(NOTHING * rest.norm()))
    strengths, basis = strengths[kept], basis[kept]
    weights = 1 - LEAK * (edge / strengths).square()
    return Leak(basis, weights, strengths, total @ basis.mT)


def _variance(expected: float, rows: Tensor, total: Tensor, error: RowError) -> float:
    """t^2: the variance expected from known errors, but at least what the rows leave of G."""
    measured = float(noise_variance(rows[None], total[None], error.dtype)[0])
    return max(expected, measured, TINY)
