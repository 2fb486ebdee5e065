r"""The factor by which clipping shrank an upload whose recipe adds a part that anybody can compute.

DP-SGD sends s (g + lambda d) with s = min(1, C / norm), which the attacker is not told; d =
dL_DAL/dE_pos is public. The rows of A are those of the upload less s lambda d, and G = A^T X has
no more directions outside the visible rows of A than patches were masked. So s is the value that
leaves least of G unexplained:

    s = argmin sum_{k > masked} sigma_k((I - Q Q^T) G)^2,   Q a basis of the rows less s lambda d.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HALVINGS = 20  # of s, tried before the golden section
GOLDEN = (5**0.5 - 1) / 2
STEPS = 48  # of the golden section, which bring s to 1e-10


def clip_factors(rows: Tensor, part: Tensor, total: Tensor, hidden: Tensor) -> Tensor:
    """The clip factors s (n,) of n uploads; 1 where G leaves s undetermined.

    rows (n, N, D) as uploaded, part (n, N, D) lambda d before the clip, total G (n, D, p), hidden
    (n, N) the masked patches.
    """
    factors = [
        _clip_factor(rows[i][~hidden[i]], part[i][~hidden[i]], total[i], int(hidden[i].sum()))
        for i in range(len(rows))
    ]
    return rows.new_tensor(factors)


def _clip_factor(rows: Tensor, part: Tensor, total: Tensor, masked: int) -> float:
    """s of one upload, from its visible rows."""

    def unexplained(s: float) -> float:
        """Energy of G beyond what `masked` directions outside the rows can hold."""
        q = torch.linalg.qr((rows - s * part).mT).Q
        rest = torch.linalg.svdvals(total - q @ (q.mT @ total))
        return float(rest[masked:].square().sum())

    if min(rows.shape[1] - len(rows), total.shape[1]) <= masked:
        return 1.0  # every s explains G
    trials = [0.0, *(0.5**k for k in range(HALVINGS, -1, -1))]
    best = min(range(len(trials)), key=lambda place: unexplained(trials[place]))
    lower, upper = trials[max(best - 1, 0)], trials[min(best + 1, len(trials) - 1)]
    return _golden_section(unexplained, lower, upper)


def _golden_section(value: Callable[[float], float], lower: float, upper: float) -> float:
    """Where the function `value` is least between two numbers."""
    left, right = (upper - GOLDEN * (upper - lower), lower + GOLDEN * (upper - lower))
    at_left, at_right = value(left), value(right)
    for _ in range(STEPS):
        if at_left < at_right:
            upper, right, at_right = right, left, at_left
            left = upper - GOLDEN * (upper - lower)
            at_left = value(left)
        else:
            lower, left, at_left = left, right, at_right
            right = lower + GOLDEN * (upper - lower)
            at_right = value(right)
    return (lower + upper) / 2
