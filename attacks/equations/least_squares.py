"""Batched least squares with the conventions of LAPACK's gelsd, the solver that breaching uses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mjp_privacy.core.machine import one_thread


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """Moore-Penrose inverse; singular values below eps * max(shape) * largest count as zero."""
    return torch.linalg.pinv(matrix, rtol=torch.finfo(matrix.dtype).eps * max(matrix.shape))


def minimum_norm_solve(a: Tensor, b: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The minimum-norm least-squares solution z of a^T z = b, and a's singular values.

    a (n, R, D), b (n, D, K) -> z (n, R, K), singular values (n, min(R, D)), descending.
    factor (m, D): the right-hand side is factor^T b, with b (n, m, K), and is never formed. Each
    precision but float64 is raised to that first.
    """
    factor = None if factor is None else factor.double()
    if a.device.type != "cpu":
        right = b.double() if factor is None else factor.mT @ b.double()
        return _by_singular_vectors(a.double(), right)
    z = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.double)
    values = torch.zeros(len(a), min(a.shape[-2:]), dtype=torch.double)

    def solve(index: int) -> None:
        z[index], values[index] = _solve_rows(a[index], b[index], factor)

    for_each_in_threads(solve, len(a))
    return z, values


def _solve_rows(a: Tensor, b: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """One system, by QR of its nonzero rows, which takes half the time of singular vectors.

    A zero row of a has a zero row of z. Where the other rows are dependent, or more than a has
    columns, the singular vectors are needed for the minimum norm.
    """
    used = (a != 0).any(-1)
    rows, right = a[used].double(), b.double()
    if len(rows) <= a.shape[-1]:
        q, r = torch.linalg.qr(rows.mT)
        s = torch.linalg.svdvals(r)
        if not len(s) or bool(s[-1] > _cutoff(s, a)):
            inside = q.mT @ right if factor is None else (factor @ q).mT @ right
            solved = torch.linalg.solve_triangular(r, inside, upper=True)
            z = solved.new_zeros(len(a), b.shape[-1])
            z[used] = solved
            return z, torch.nn.functional.pad(s, (0, min(a.shape) - len(s)))
    return _by_singular_vectors(a.double(), right if factor is None else factor.mT @ right)


def _by_singular_vectors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)  # a^T = vh^T s u^T
    inverse = torch.where(s > _cutoff(s, a), 1 / s.clamp_min(torch.finfo(s.dtype).tiny), 0.0)
    return u @ (inverse.unsqueeze(-1) * (vh @ b)), s


def _cutoff(s: Tensor, a: Tensor) -> Tensor:
    """What singular values s of a must exceed to count in a solution, as in gelsd."""
    return torch.finfo(s.dtype).eps * max(a.shape[-2:]) * s[..., :1]


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


def lbfgs(unknowns: Tensor, steps: int, history: int) -> torch.optim.LBFGS:
    """L-BFGS that does so many steps at each call and remembers `history` of them."""
    return torch.optim.LBFGS(
        [unknowns],
        max_iter=steps,
        history_size=history,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )


def for_each_in_threads(work: Callable[[int], None], number: int) -> None:
    """Does work(0), ..., work(number - 1), as many at a time as torch may use threads.

    Each runs with one thread of its own, so that the results are the same bits whatever the number
    of threads. Decompositions of matrices of a few hundred rows gain nothing from a second one.
    """
    threads = min(torch.get_num_threads(), number)
    with one_thread():
        if threads <= 1:
            for index in range(number):
                work(index)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work, range(number)):
                pass  # reading the results raises what a thread raised
