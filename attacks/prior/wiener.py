r"""Posterior mean of patches under a Gaussian prior, from a linear system with noise.

    Y = A^T X W^T + noise,   rows of X independent, each N(mu, Sigma),   noise of one variance t^2

With A = U diag(s) V^T and W Sigma W^T = R diag(l) R^T, the entries of V^T Y R are independent:
entry (k, c) observes the k-th mixture of patches with gain s_k, so that

    X^ = 1 mu^T + U [ s_k / (s_k^2 l_c + t^2) (V^T (Y - A^T 1 mu^T W^T) R)_kc ] R^T W Sigma.

Mixtures below the noise fall back to the prior instead of being amplified.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNSEEN = 1e-13  # share of the largest prior variance: below it W drops the direction
TINY = 1e-300


@dataclass(frozen=True)
class PatchPrior:
    """N(mean, covariance) of a normalised patch, observed through W (K, p), None meaning W = I."""

    mean: Tensor  # (p,)
    covariance: Tensor  # (p, p)
    weight: Tensor | None = None  # W

    def spread(self) -> tuple[Tensor, Tensor, Tensor]:
        """l (k,), R (K, k) and the gain R^T W Sigma (k, p) of the k directions that W keeps."""
        through = self.covariance if self.weight is None else self.weight @ self.covariance
        system = through if self.weight is None else through @ self.weight.mT
        values, vectors = torch.linalg.eigh((system + system.mT) / 2)
        seen = values > UNSEEN * values[-1]
        return values[seen], vectors[:, seen], vectors[:, seen].mT @ through


def posterior_patches(
    rows: Tensor, total: Tensor, prior: PatchPrior, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """The posterior mean X^ (n, R, p), and the singular values of A (n, min(R, D)), descending.

    rows A (n, R, D), total Y (n, D, K), noise t^2 (n,).
    """
    centre = prior.mean if prior.weight is None else prior.weight @ prior.mean
    u, s, vh = torch.linalg.svd(rows, full_matrices=False)
    values, vectors, gain = prior.spread()
    expected = rows.sum(1).unsqueeze(-1) * centre
    seen = vh @ (total - expected) @ vectors
    scale = s.unsqueeze(-1)
    strength = scale.square() * values + noise.clamp_min(TINY).view(-1, 1, 1)
    return prior.mean + u @ (seen * scale / strength @ gain), s


def expected_square(mean: Tensor, covariance: Tensor) -> Tensor:
    """E x^2 of every entry under N(mean, covariance)."""
    return covariance.diagonal() + mean.square()


def known_variance(row_error: Tensor, total_error: Tensor, prior: PatchPrior, rows: int) -> Tensor:
    """t^2 (n,) from the known standard deviations (n,) of the errors on entries of A and of Y.

    If Y = A^T X + E_Y is solved with A + E_A in place of A, the error is E_Y - E_A^T X, whose
    variance is var_Y + var_A sum_i E x_i^2 (errors in variables).
    """
    energy = expected_square(prior.mean, prior.covariance).mean()
    return total_error.square() + row_error.square() * rows * energy


def noise_variance(rows: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """t^2 (n,) from what A cannot explain: the part of Y outside A's row space is noise alone.

    It is at least the rounding of the client's precision, and just that where A's rows span all.
    """
    s, vh = torch.linalg.svd(rows, full_matrices=False)[1:]
    cutoff = torch.finfo(dtype).eps * max(rows.shape[-2:]) * s[:, :1]
    within = torch.where(s > cutoff, 1.0, 0.0).unsqueeze(-1)
    rest = total - vh.mT @ (within * (vh @ total))
    free = total.shape[1] - within.sum((1, 2))
    energy = rest.square().sum((1, 2)) / total.shape[2]
    rounding = (torch.finfo(dtype).eps * total.flatten(1).norm(dim=1)) ** 2 / total[0].numel()
    return torch.where(free > 0, torch.maximum(energy / free.clamp_min(1), rounding), rounding)
