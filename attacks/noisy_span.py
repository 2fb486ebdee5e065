r"""The most probable picture where the upload is known to be noisy, quantised or sparsified.

`attacks.span` solves exactly and amplifies what a defence added. Here what it says of a picture X
(N, p) is weighed by its known error: with A_r, G_r, hidden patches H_r of upload r, b_k the
directions that its hidden patches leak into and P_r = I - sum_k w_k b_k b_k^T,

    sum_r tr((A_r^T X - G_r) P_r (A_r^T X - G_r)^T) / t_r^2
        + sum_r sum_{j in H_r} |x_j P_r|^2 / s_r^2
        + (X - m)^T Sigma^-1 (X - m)

is least. w_k is 1 less LEAK times the square of what noise alone would reach over the direction's
strength: leaks are taken out wherever they may be, for they mislead more than noise of their size;
what is left of a direction still counts where nothing else says anything of it. t^2 = var(G) +
var(A) sum_i E x_i^2, for noise on A makes an error A's rows cannot see (errors in variables), and
no less than what A leaves of G. The second sum says that hidden patches lie in their span, where
all of its directions are above the noise. One quadratic for all uploads, by conjugate gradients
from the exact solution or, where noise drowns that, from the prior's mean, preconditioned by the
best guess of each patch alone:

    S (x) M + I (x) Sigma_p^-1,   S = sum_r A_r A_r^T / t_r^2,   M the weighted mean of the P_r.

G says something of A too: a picture gives the rows' mean and spread, from what was sent and from
G = A^T X, which make a better picture, and so on (PASSES times).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.completion import FieldEnergy
from attacks.patch_system import PATCH, TABLE, PatchSystem, error_of
from attacks.prior.gaussian import JITTER
from attacks.span import noise_edge, off_the_visible
from attacks.wiener import TINY, expected_square, noise_variance
from mjp_privacy.interfaces import ClientUpdate

TOLERANCE = 1e-6  # of the residual, most of which is the visible patches'
STEPS = 300
LEAK = 0.02
"""On photographs that no table shows single uploads gain up to .1 and several lose, the less noisy
the more."""
NOTHING = 1e-12  # of G: a singular value that is zero
PASSES = 4  # of the rows and the leak, after the first solution


@dataclass(frozen=True)
class Leak:
    """What the hidden patches of an upload leave in G, direction by direction."""

    basis: Tensor  # b (k, p)
    weights: Tensor  # w (k,)
    strengths: Tensor  # (k,) singular values of b in what the visible rows leave of G
    mixed: Tensor  # G b^T (D, k)

    def without(self, patches: Tensor) -> Tensor:
        """x P for every row."""
        return patches - (patches @ self.basis.mT * self.weights) @ self.basis


@dataclass(frozen=True)
class RowError:
    """What is known of A and G before X is."""

    sent: Tensor  # A as uploaded
    rows: float  # variance of the error on an entry of A
    total: float  # the same of G
    energy: float  # E x^2 of an entry of a patch
    dtype: torch.dtype


@dataclass(frozen=True)
class NoisyUpload:
    """One upload of one picture, its error known; float64."""

    rows: Tensor  # A (N, D), hidden rows zero
    total: Tensor  # G P (D, p)
    hidden: Tensor  # (N,)
    precision: float  # 1 / t^2
    inside: float  # 1 / s^2: of a hidden patch outside its span
    leak: Leak
    error: RowError

    def outside(self, patches: Tensor) -> Tensor:
        """x P for every patch."""
        return self.leak.without(patches)

    def pull(self) -> Tensor:
        """A G P / t^2 (N, p)."""
        return self.precision * (self.rows @ self.total)

    def force(self, patches: Tensor) -> Tensor:
        """The quadratic's matrix applied to X (N, p)."""
        out = self.outside(patches)
        weighed = self.precision * (self.rows @ (self.rows.mT @ out))
        return weighed + self.inside * torch.where(self.hidden.unsqueeze(1), out, 0.0)

    def with_rows(self, patches: Tensor) -> NoisyUpload:
        """The same with A as it is known beside a guess of X, for G = A^T X tells of A too."""
        error, visible = self.error, ~self.hidden
        if not error.rows or not error.total:
            return self
        seen = patches[visible]
        told = torch.eye(len(seen)).to(seen) / error.rows
        spread = torch.linalg.inv(told + self.outside(seen) @ seen.mT / error.total)
        rows = torch.zeros_like(self.rows)
        right = error.sent[visible] / error.rows + seen @ self.total.mT / error.total
        rows[visible] = spread @ right
        known = error.total + float(spread.diagonal().sum()) * error.energy
        return replace(self, rows=rows, precision=1 / _variance(known, rows, self.total, error))

    def without_leak(self, patches: Tensor) -> NoisyUpload:
        """The same with the hidden patches' own leak weighed, given a guess of X.

        Its directions b are off by noise over their strengths, so that P does not quite remove the
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
    """The picture at `index`; mean (p,) and covariance (p, p) of a patch."""
    row_error, total_error = (float(error_of(update, name)[index]) for name in (TABLE, PATCH))
    rows, total, hidden = system.rows[index], system.total[index], system.hidden[index]
    energy = expected_square(mean, covariance)
    error = RowError(rows, row_error**2, total_error**2, float(energy.mean()), update.dtype)
    known = error.total + error.rows * len(rows) * error.energy
    rest, masked = off_the_visible(system, index, total), int(hidden.sum())
    edge = noise_edge(known**0.5, max(rest.shape[0] - int((~hidden).sum()), 0), rest.shape[1])
    leak = _leak(rest, total, masked, edge)
    outside = leak.without(total)
    variance = _variance(known, rows, outside, error)
    inside = 0.0
    if masked and len(leak.basis) == masked and leak.strengths[-1] > edge:
        spread = variance * float(leak.strengths.reciprocal().square().mean()) * float(energy.sum())
        inside = 1 / max(spread, TINY)
    return NoisyUpload(rows, outside, hidden, 1 / variance, inside, leak, error)


def _leak(rest: Tensor, total: Tensor, masked: int, edge: float) -> Leak:
    """Of `masked` directions at most, those that have a weight."""
    _, strengths, basis = torch.linalg.svd(rest, full_matrices=False)
    strengths, basis = strengths[:masked], basis[:masked]
    kept = strengths > max(LEAK**0.5 * edge, float(NOTHING * rest.norm()))
    strengths, basis = strengths[kept], basis[kept]
    weights = 1 - LEAK * (edge / strengths).square()
    return Leak(basis, weights, strengths, total @ basis.mT)


def _variance(known: float, rows: Tensor, total: Tensor, error: RowError) -> float:
    """t^2: what is known, but no less than what the rows leave of G."""
    measured = float(noise_variance(rows[None], total[None], error.dtype)[0])
    return max(known, measured, TINY)


def most_probable(
    uploads: Sequence[NoisyUpload],
    mean: Tensor,
    covariance: Tensor,
    field: FieldEnergy | None,
    exact: Tensor | None = None,
) -> Tensor:
    """Patches (N, p), normalised; without a field each patch has its own prior alone. `exact` is
    what they would be without any error, where the errors may be too small to matter."""
    found = _solved(uploads, mean, covariance, field, exact)
    for _ in range(PASSES):
        weighed = [upload.with_rows(found).without_leak(found) for upload in uploads]
        found = _solved(weighed, mean, covariance, field, found)
    return found


def _solved(
    uploads: Sequence[NoisyUpload],
    mean: Tensor,
    covariance: Tensor,
    field: FieldEnergy | None,
    guess: Tensor | None,
) -> Tensor:
    alone = _PatchesAlone.of(uploads, covariance)
    pull = torch.stack([upload.pull() for upload in uploads]).sum(0)
    given = mean if field is None else field.mean.repeat_interleave(field.patch_size**2)
    centre = given.to(pull).expand_as(pull)

    def apply(patches: Tensor) -> Tensor:
        prior = alone.prior_force(patches) if field is None else field.force(patches)
        return torch.stack([upload.force(patches) for upload in uploads]).sum(0) + prior

    drawn = torch.stack([upload.force(centre) for upload in uploads]).sum(0)
    start = None if guess is None else guess - centre
    return centre + _conjugate_gradients(apply, pull - drawn, alone.inverse, start)


@dataclass(frozen=True)
class _PatchesAlone:
    """S (x) M + I (x) Sigma_p^-1 and its inverse: U and V make both sums diagonal."""

    u: Tensor  # (N, N): S = U diag(s) U^T
    v: Tensor  # (p, p): V^T Sigma_p^-1 V = I, V^T M V = diag(m)
    scale: Tensor  # (N, p): s_i m_c + 1
    precision: Tensor  # Sigma_p^-1

    @classmethod
    def of(cls, uploads: Sequence[NoisyUpload], covariance: Tensor) -> _PatchesAlone:
        like = uploads[0].rows
        covariance = covariance.to(like)
        width = len(covariance)
        every = torch.eye(width).to(like)
        seen = torch.stack([upload.outside(every) for upload in uploads]).mean(0)
        gram = torch.stack([u.precision * u.rows @ u.rows.mT for u in uploads]).sum(0)
        s, u = torch.linalg.eigh(gram)
        ridge = JITTER * float(covariance.diagonal().mean())
        covariance = covariance + ridge * torch.eye(width).to(like)
        root = torch.linalg.cholesky(covariance)
        m, w = torch.linalg.eigh(root.mT @ seen @ root)
        scale = s.clamp_min(0).unsqueeze(1) * m.clamp_min(0) + 1
        return cls(u, root @ w, scale, torch.linalg.inv(covariance))

    def prior_force(self, patches: Tensor) -> Tensor:
        return patches @ self.precision

    def inverse(self, force: Tensor) -> Tensor:
        return self.u @ ((self.u.mT @ force @ self.v) / self.scale) @ self.v.mT


def _conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    wanted: Tensor,
    inverse: Callable[[Tensor], Tensor],
    guess: Tensor | None,
) -> Tensor:
    """X with apply(X) = wanted, from the guess or, where that is nearer, from zero; residuals are
    measured as the preconditioner does. Where numbers end it stops with what it has."""
    solution, residual = torch.zeros_like(wanted), wanted
    shaped = inverse(residual)
    product = (residual * shaped).sum()
    target = TOLERANCE**2 * product
    if guess is not None:
        pulled = apply(guess)
        if (guess * (pulled / 2 - wanted)).sum() < 0:  # the quadratic is 0 at zero
            solution, residual = guess, wanted - pulled
            shaped = inverse(residual)
            product = (residual * shaped).sum()
    direction = shaped
    for _ in range(STEPS):
        moved = apply(direction)
        curvature = (direction * moved).sum()
        if not product > target or not curvature > 0:
            break
        step = product / curvature
        solution = solution + step * direction
        residual = residual - step * moved
        shaped = inverse(residual)
        next_product = (residual * shaped).sum()
        direction, product = shaped + next_product / product * direction, next_product
    return solution
