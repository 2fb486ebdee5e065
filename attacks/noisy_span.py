r"""The most probable picture where the upload is known to be noisy, quantised or sparsified.

`attacks.span` solves exactly and amplifies what a defence added. Here what it says of a picture X
(N, p) is weighed by its known error: with A_r, G_r, hidden patches H_r of upload r, B_r the
directions of its hidden patches that stand above the noise and P_r = I - B_r^T B_r,

    sum_r |A_r^T X P_r - G_r P_r|^2 / t_r^2
        + sum_r sum_{j in H_r} |x_j P_r|^2 / s_r^2
        + (X - m)^T Sigma^-1 (X - m)

is least. t^2 = var(G) + var(A) sum_i E x_i^2, for noise on A makes an error A's rows cannot see
(errors in variables), and no less than what A leaves of G. The second sum says that hidden patches
lie in their span, where all of its directions are above the noise. One quadratic for all uploads,
by conjugate gradients from the best guess of each patch alone, which also preconditions:

    S (x) M + I (x) Sigma_p^-1,   S = sum_r A_r A_r^T / t_r^2,   M the weighted mean of the P_r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.completion import FieldEnergy
from attacks.patch_system import PATCH, TABLE, PatchSystem, error_of
from attacks.prior.gaussian import JITTER
from attacks.span import masked_basis, noise_edge, off_the_visible
from attacks.wiener import TINY, expected_square, noise_variance
from mjp_privacy.interfaces import ClientUpdate

TOLERANCE = 1e-6  # of the residual, most of which is the visible patches'
STEPS = 300
PASSES = 1  # of the leak, after the first solution


@dataclass(frozen=True)
class NoisyUpload:
    """One upload of one picture, its error known; float64."""

    rows: Tensor  # A (N, D)
    total: Tensor  # G P (D, p)
    basis: Tensor  # B (k, p)
    hidden: Tensor  # (N,)
    precision: float  # 1 / t^2
    inside: float  # 1 / s^2: of a hidden patch outside its span
    mixed: Tensor  # G B^T (D, k)
    strengths: Tensor  # (k,) singular values of B in what A leaves of G

    def outside(self, patches: Tensor) -> Tensor:
        """x P for every patch."""
        return patches - (patches @ self.basis.mT) @ self.basis

    def pull(self) -> Tensor:
        """A G P / t^2 (N, p)."""
        return self.precision * (self.rows @ self.total)

    def force(self, patches: Tensor) -> Tensor:
        """The quadratic's matrix applied to X (N, p)."""
        out = self.outside(patches)
        weighed = self.precision * (self.rows @ (self.rows.mT @ out))
        return weighed + self.inside * torch.where(self.hidden.unsqueeze(1), out, 0.0)

    def without_leak(self, patches: Tensor) -> NoisyUpload:
        """The same with the hidden patches' own leak weighed, given a guess of X.

        B is off by noise over its strengths, so that P does not quite remove the hidden patches:
        of their share C B of G, C diag(1 / strength) times noise is left. Both sides of G = A^T X
        are multiplied by the inverse root of I + C diag(1 / strength^2) C^T.
        """
        if not len(self.basis):
            return self
        share = (self.mixed - self.rows.mT @ (patches @ self.basis.mT)) / self.strengths
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
    known = total_error**2 + row_error**2 * len(rows) * float(energy.mean())
    masked = int(hidden.sum())
    rest = off_the_visible(system, index, total)
    free = rest.shape[0] - int((~hidden).sum())
    edge = noise_edge(known**0.5, max(free, 0), rest.shape[1])
    basis = masked_basis(rest, masked, 0.0, edge=edge)
    outside = total - (total @ basis.mT) @ basis
    measured = noise_variance(rows[None], outside[None], update.dtype)[0]
    variance = max(known, float(measured), TINY)
    inside = 0.0
    strengths = torch.linalg.svdvals(rest)[: len(basis)]
    if masked and len(basis) == masked:
        spread = variance * float(strengths.reciprocal().square().mean()) * float(energy.sum())
        inside = 1 / max(spread, TINY)
    mixed = total @ basis.mT
    return NoisyUpload(rows, outside, basis, hidden, 1 / variance, inside, mixed, strengths)


def most_probable(
    uploads: Sequence[NoisyUpload],
    mean: Tensor,
    covariance: Tensor,
    field: FieldEnergy | None,
) -> Tensor:
    """Patches (N, p), normalised; without a field each patch has its own prior alone."""
    found = _solved(uploads, mean, covariance, field)
    for _ in range(PASSES):
        weighed = [upload.without_leak(found) for upload in uploads]
        found = _solved(weighed, mean, covariance, field)
    return found


def _solved(
    uploads: Sequence[NoisyUpload],
    mean: Tensor,
    covariance: Tensor,
    field: FieldEnergy | None,
) -> Tensor:
    alone = _PatchesAlone.of(uploads, covariance)
    pull = torch.stack([upload.pull() for upload in uploads]).sum(0)
    given = mean if field is None else field.mean.repeat_interleave(field.patch_size**2)
    centre = given.to(pull).expand_as(pull)

    def apply(patches: Tensor) -> Tensor:
        prior = alone.prior_force(patches) if field is None else field.force(patches)
        return torch.stack([upload.force(patches) for upload in uploads]).sum(0) + prior

    drawn = torch.stack([upload.force(centre) for upload in uploads]).sum(0)
    return centre + _conjugate_gradients(apply, pull - drawn, alone.inverse)


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
        seen = torch.eye(width).to(like)
        for upload in uploads:
            seen = seen - upload.basis.mT @ upload.basis / len(uploads)
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
    apply: Callable[[Tensor], Tensor], residual: Tensor, inverse: Callable[[Tensor], Tensor]
) -> Tensor:
    """X with apply(X) = residual, from zero; the residual is measured as the preconditioner does.

    Where numbers end it stops with what it has.
    """
    solution = torch.zeros_like(residual)
    shaped = inverse(residual)
    direction, product = shaped, (residual * shaped).sum()
    target = TOLERANCE**2 * product
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
