r"""By how much a clipped upload was shrunk, where its recipe adds a part that anybody can compute.

DP-SGD sends s (g + lambda d) with s = min(1, C / norm), which nobody is told; d = dL_DAL/dE_pos is
public. The rows of A are those of the upload less s lambda d, and G = A^T X has no more directions
outside the visible rows of A than patches were masked. So s is where the least is left of G:

    s = argmin sum_{k > masked} sigma_k((I - Q Q^T) G)^2,   Q a basis of the rows less s lambda d.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HALVINGS = 20  # of s, to begin with
GOLDEN = (5**0.5 - 1) / 2
STEPS = 48  # of the golden section: 1e-10 of s


def clip_factors(rows: Tensor, part: Tensor, total: Tensor, hidden: Tensor) -> Tensor:
    """s (n,) of rows (n, N, D), their computable part before the clip and G (n, D, p)."""
    found = [
        _clip_factor(rows[i][~hidden[i]], part[i][~hidden[i]], total[i], int(hidden[i].sum()))
        for i in range(len(rows))
    ]
    return rows.new_tensor(found)


def _clip_factor(rows: Tensor, part: Tensor, total: Tensor, masked: int) -> float:
    def left(s: float) -> float:
        q = torch.linalg.qr((rows - s * part).mT).Q
        rest = torch.linalg.svdvals(total - q @ (q.mT @ total))
        return float(rest[masked:].square().sum())

    if min(rows.shape[1] - len(rows), total.shape[1]) <= masked:
        return 1.0  # anything explains G
    trials = [0.0, *(0.5**k for k in range(HALVINGS, -1, -1))]
    best = min(range(len(trials)), key=lambda place: left(trials[place]))
    lower, upper = trials[max(best - 1, 0)], trials[min(best + 1, len(trials) - 1)]
    return _golden_section(left, lower, upper)


def _golden_section(left: Callable[[float], float], lower: float, upper: float) -> float:
    """Where `left` is least between two numbers."""
    one, other = (upper - GOLDEN * (upper - lower), lower + GOLDEN * (upper - lower))
    at_one, at_other = left(one), left(other)
    for _ in range(STEPS):
        if at_one < at_other:
            upper, other, at_other = other, one, at_one
            one = upper - GOLDEN * (upper - lower)
            at_one = left(one)
        else:
            lower, one, at_one = one, other, at_other
            other = lower + GOLDEN * (upper - lower)
            at_other = left(other)
    return (lower + upper) / 2
