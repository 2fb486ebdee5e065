"""Batched least squares with the conventions of LAPACK's gelsd, the solver that breaching uses."""

from __future__ import annotations

import torch
from torch import Tensor


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """Moore-Penrose inverse; singular values below eps * max(shape) * largest count as zero."""
    return torch.linalg.pinv(matrix, rtol=torch.finfo(matrix.dtype).eps * max(matrix.shape))


def minimum_norm_solve(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum-norm least-squares solution z of a^T z = b, and a's singular values.

    a (n, R, D), b (n, D, K) -> z (n, R, K), singular values (n, min(R, D)), descending.
    """
    u, s, vh = torch.linalg.svd(a, full_matrices=False)  # a^T = vh^T s u^T
    cutoff = torch.finfo(a.dtype).eps * max(a.shape[-2:]) * s[..., :1]
    inverse = torch.where(s > cutoff, 1 / s.clamp_min(torch.finfo(a.dtype).tiny), 0.0)
    return u @ (inverse.unsqueeze(-1) * (vh @ b)), s


def condition_and_rank(
    a: Tensor, dtype: torch.dtype, singular_values: Tensor | None = None
) -> dict[str, Tensor]:
    """Condition number over the nonzero rows of a (n, R, D), numerical rank, and counts of rows.

    `dtype` is the precision in which the gradient was computed: a singular value below
    eps(dtype) * max(shape) * largest is noise and does not count for the rank.
    """
    nonzero = (a != 0).any(-1).sum(-1)
    s = torch.linalg.svdvals(a.double()) if singular_values is None else singular_values
    rows = nonzero.clamp(1, s.shape[-1])
    smallest = s.gather(-1, (rows - 1).unsqueeze(-1)).squeeze(-1)
    cutoff = torch.finfo(dtype).eps * max(a.shape[-2:]) * s[..., :1]
    return {
        "cond_a": s[..., 0] / smallest,
        "rank_a": (s > cutoff).sum(-1).double(),
        "nonzero_rows": nonzero.double(),
        "zero_rows": (a.shape[-2] - nonzero).double(),
    }
