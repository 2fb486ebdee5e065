r"""The most probable picture where the upload is known to be noisy, quantised or sparsified.

`equations.span` solves exactly, which amplifies the errors that a defence added. Here each equation
for a picture X (N, p) is weighed by its known error (`equations.noisy_upload`). With A_r, G_r and
the hidden patches H_r of upload r, b_k the directions that these leak into and
P_r = I - sum_k w_k b_k b_k^T, the picture is where

    sum_r tr((A_r^T X - G_r) P_r (A_r^T X - G_r)^T) / t_r^2
        + sum_r sum_{j in H_r} |x_j P_r|^2 / s_r^2
        + (X - m)^T Sigma^-1 (X - m)

is least. w_k is 1 - LEAK (e / strength)^2, where e is the strength that noise alone would reach.
Directions no stronger than noise are removed too, because a leak misleads more than noise of its
size; what is left of a direction still counts where nothing else determines it. t^2 = var(G) +
var(A) sum_i E x_i^2, the second term because A is noisy as well (errors in variables), and at
least what A leaves unexplained of G. The second sum says that hidden patches lie in their span; it
is used where all directions of the span are above the noise.

The quadratic is minimised by conjugate gradients. They start at the exact solution or, where noise
spoilt that, at the prior's mean. The preconditioner is the quadratic with each patch alone,

    S (x) M + I (x) Sigma_p^-1,   S = sum_r (A_r A_r^T / t_r^2 + I_{H_r} / s_r^2),

M the mean of the P_r.

G also says something about A: given a picture, the rows of A have a mean and a spread that follow
from what was sent and from G = A^T X. With these a better picture is found, PASSES times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.equations.completion import FieldEnergy
from attacks.equations.noisy_upload import NoisyUpload
from attacks.prior.gaussian import JITTER

TOLERANCE = 1e-6  # share of the first residual, most of which comes from visible patches
STEPS = 300
PASSES = 4  # new estimates of the rows and the leak, after the first solution


def most_probable(
    uploads: Sequence[NoisyUpload],
    mean: Tensor,
    covariance: Tensor,
    field: FieldEnergy | None,
    exact: Tensor | None = None,
) -> Tensor:
    """The most probable patches (N, p), normalised.

    mean (p,) and covariance (p, p) are those of one patch. Without a field each patch has that
    prior alone. `exact` (N, p), the solution that ignores all errors, is where to start.
    """
    patches = _solved(uploads, mean, covariance, field, exact)
    for _ in range(PASSES):
        weighed = [upload.with_rows(patches).without_leak(patches) for upload in uploads]
        patches = _solved(weighed, mean, covariance, field, patches)
    return patches


def _solved(
    uploads: Sequence[NoisyUpload],
    mean: Tensor,
    covariance: Tensor,
    field: FieldEnergy | None,
    guess: Tensor | None,
) -> Tensor:
    """The patches (N, p) that minimise the quadratic for fixed rows and leaks."""
    alone = _PatchesAlone.of(uploads, covariance)
    pull = torch.stack([upload.pull() for upload in uploads]).sum(0)
    prior_mean = mean if field is None else field.mean.repeat_interleave(field.patch_size**2)
    centre = prior_mean.to(pull).expand_as(pull)

    def apply(patches: Tensor) -> Tensor:
        """The quadratic's matrix times patches (N, p)."""
        prior = alone.prior_force(patches) if field is None else field.force(patches)
        return torch.stack([upload.force(patches) for upload in uploads]).sum(0) + prior

    force_at_centre = torch.stack([upload.force(centre) for upload in uploads]).sum(0)
    start = None if guess is None else guess - centre
    return centre + _conjugate_gradients(apply, pull - force_at_centre, alone.inverse, start)


@dataclass(frozen=True)
class _PatchesAlone:
    """S (x) M + I (x) Sigma_p^-1 and its inverse: U and V make both terms diagonal."""

    u: Tensor  # (N, N): S = U diag(s) U^T
    v: Tensor  # (p, p): V^T Sigma_p^-1 V = I, V^T M V = diag(m)
    scale: Tensor  # (N, p): s_i m_c + 1
    precision: Tensor  # Sigma_p^-1

    @classmethod
    def of(cls, uploads: Sequence[NoisyUpload], covariance: Tensor) -> _PatchesAlone:
        """Both terms made diagonal, for these uploads and the covariance of a patch."""
        like = uploads[0].rows
        covariance = covariance.to(like)
        width = len(covariance)
        identity = torch.eye(width).to(like)
        mean_outside = torch.stack([upload.outside(identity) for upload in uploads]).mean(0)
        weights = [u.weight + torch.diag(u.inside * u.hidden.to(like)) for u in uploads]
        s, u = torch.linalg.eigh(torch.stack(weights).sum(0))
        ridge = JITTER * float(covariance.diagonal().mean())
        covariance = covariance + ridge * torch.eye(width).to(like)
        root = torch.linalg.cholesky(covariance)
        m, w = torch.linalg.eigh(root.mT @ mean_outside @ root)
        scale = s.clamp_min(0).unsqueeze(1) * m.clamp_min(0) + 1
        return cls(u, root @ w, scale, torch.linalg.inv(covariance))

    def prior_force(self, patches: Tensor) -> Tensor:
        """Patches (N, p) times Sigma_p^-1."""
        return patches @ self.precision

    def inverse(self, force: Tensor) -> Tensor:
        """The inverse applied to (N, p)."""
        return self.u @ ((self.u.mT @ force @ self.v) / self.scale) @ self.v.mT


def _conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    wanted: Tensor,
    inverse: Callable[[Tensor], Tensor],
    guess: Tensor | None,
) -> Tensor:
    """The solution X of apply(X) = wanted, `inverse` being the preconditioner.

    Starts at the guess where the quadratic is less there than at zero. Residuals are measured in
    the preconditioner's norm. Stops with the last X where rounding or NaN makes a step impossible.
    """
    solution, residual = torch.zeros_like(wanted), wanted
    shaped = inverse(residual)
    product = (residual * shaped).sum()
    target = TOLERANCE**2 * product
    if guess is not None:
        pulled = apply(guess)
        if (guess * (pulled / 2 - wanted)).sum() < 0:  # the quadratic at X = 0 is 0
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
