r"""The most probable picture where the upload is known to be noisy, quantised or sparsified.

`equations.span` solves exactly and amplifies what a defence added. Here what it says of a picture X
(N, p) is weighed by its known error (`equations.noisy_upload`): with A_r, G_r, hidden patches H_r
of upload r, b_k the directions that its hidden patches leak into and P_r = I - sum_k w_k b_k b_k^T,

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
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.equations.completion import FieldEnergy
from attacks.equations.noisy_upload import NoisyUpload
from attacks.prior.gaussian import JITTER

TOLERANCE = 1e-6  # of the residual, most of which is the visible patches'
STEPS = 300
PASSES = 4  # of the rows and the leak, after the first solution


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
