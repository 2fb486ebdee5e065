r"""What one upload of a batch says of each of its B pictures, and how exactly it says it.

With patches x_{b,i} of picture b at position i, and g_{b,i} their gradients, the upload holds

    G = sum_{b,i} g_{b,i} x_{b,i}^T,    row i of pos_embed.grad = sum_b g_{b,i},

the latter over the pictures in which position i is visible. Off the rows of the table's gradient
(Q an orthonormal basis of them)

    H = (I - Q Q^T) G   has row space   S,   orthonormal basis V (q, p),   q = N (B - 1) + k,

the span of the differences between the pictures at each position, and of every patch that MJP
masked; k counts the positions that are masked in all pictures. Then C = lstsq(A_v^T, G (I - P_S)),
A_v the visible rows, holds what all pictures have in common off S:

    (I - P_S) x_{b,i} = C_i  where position i is visible in picture b,  and c where it is masked,

with c = 0. Where the gradient of E_unk is sent, which is the sum of the masked g_{b,i}, it is one
more row of A_v; then S has the differences of masked patches only, q is one less and c is C's last
row.

How exact that is follows from the upload itself. Singular values of H beyond the q-th would be
zero but for rounding, so the first of them is the size e of the upload's errors. An error of size e
tilts the basis row v_j by e / s_j. So a patch x with the lift a = x V^T meets its equation up to

    e sqrt( |(a - L_i V^T) / s|^2 + |row i of (A_v^T)^+|^2 ),   L = lstsq(A_v^T, G).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.equations.least_squares import minimum_norm_solve
from attacks.equations.patch_system import PatchSystem
from attacks.equations.span import noise_edge

GAP = 100.0  # by which a singular value exceeds the one after it where the rank ends
WEAK = 3.0  # times the noise: a direction no stronger than this is one of the noise


@dataclass(frozen=True)
class MaskedPatches:
    """What the masked patches of all pictures have in common off S."""

    complement: Tensor  # c (p,)
    mixture: Tensor  # (q,)
    gain: Tensor  # ()


@dataclass(frozen=True)
class BatchSpan:
    """(I - P_S) x_i = C_i for the N positions of every picture of one upload; float64."""

    basis: Tensor  # V (q, p), orthonormal rows
    complement: Tensor  # C (N, p); c where masked in all pictures
    hidden: Tensor  # (N,) bool: masked in all pictures
    strength: Tensor  # (q,) singular values of H; infinite for a direction that is noise
    noise: float  # e
    mixture: Tensor  # L V^T (N, q)
    gain: Tensor  # (N,) by which errors of G enter a row of C
    masked: MaskedPatches
    mixed: bool = False  # a position may be visible in one picture and masked in another

    def known(self, visible: Tensor) -> Tensor:
        """The right-hand sides (N, p) of a picture that is visible at these positions (N,)."""
        return torch.where(visible.unsqueeze(-1), self.complement, self.masked.complement)

    def off(self, patches: Tensor) -> Tensor:
        """(I - P_S) applied to rows (..., p)."""
        return patches - (patches @ self.basis.mT) @ self.basis

    def tilt(self, directions: Tensor) -> Tensor:
        """How far off S unit vectors of S (m, p) may seem to lie because of errors; (m,)."""
        return self.noise * (directions @ self.basis.mT / self.strength).norm(dim=-1)

    def expected(self, patches: Tensor, visible: Tensor) -> Tensor:
        """How far patches (N, p) that stand in the upload may seem off their equations; (N,).

        visible  (N,) bool: the positions at which the picture is visible
        """
        mixture = torch.where(visible.unsqueeze(-1), self.mixture, self.masked.mixture)
        gain = torch.where(visible, self.gain, self.masked.gain)
        lift = patches @ self.basis.mT - mixture
        return self.noise * ((lift / self.strength).square().sum(-1) + gain.square()).sqrt()


def batch_span(
    system: PatchSystem, index: int, batch: int, precision: float, *, can_mask: bool = False
) -> BatchSpan:
    """The span of the upload at `index` of the system, taken for one of `batch` pictures.

    precision  eps of the numbers that were sent: errors are at least of this relative size
    can_mask   pictures may have masks of their own; the gradient of E_unk is used where it was sent
    """
    hidden, total = system.hidden[index], system.total[index]
    rows = system.rows[index][~hidden]
    sums = None if system.hidden_sum is None or not can_mask else system.hidden_sum[index]
    pooled = sums is not None and bool(sums.any())
    if sums is not None and pooled:
        rows = torch.cat((rows, sums[None]))
    q = torch.linalg.qr(rows.mT).Q
    _, s, vh = torch.linalg.svd(total - q @ (q.mT @ total), full_matrices=False)
    count = len(hidden) * (batch - 1) + int(hidden.sum()) - pooled
    count = max(0, min(count, len(s)))
    basis, strength = vh[:count], s[:count]
    noise = max(rounding_of(total, precision), float(s[count]) if count < len(s) else 0.0)
    # A direction of this size is one of the noise: no patch lies in it, so nothing tilts it.
    strength = torch.where(strength > WEAK * noise, strength, torch.inf)
    identity = torch.eye(len(total)).to(total)
    operator = minimum_norm_solve(rows[None], identity[None])[0][0]
    masked = torch.cat((operator, operator.new_zeros(1, len(total))))[int((~hidden).sum())]
    by_place = masked.expand(len(hidden), -1).clone()
    by_place[~hidden] = operator[: int((~hidden).sum())]
    solved, anchor = by_place @ total, masked @ total
    lift, anchor_lift = solved @ basis.mT, anchor @ basis.mT
    return BatchSpan(
        basis,
        solved - lift @ basis,
        hidden,
        strength,
        noise,
        lift,
        by_place.norm(dim=1),
        MaskedPatches(anchor - anchor_lift @ basis, anchor_lift, masked.norm()),
        can_mask and (sums is None or pooled),
    )


def rounding_of(total: Tensor, precision: float) -> float:
    """The largest singular value to expect of the rounding of G (D, p), entry by entry."""
    deviation = precision / 2 * float(total.square().mean().sqrt())
    return noise_edge(deviation, *total.shape)


def pictures_by_rank(total: Tensor, patches: int, precision: float) -> int | None:
    """The number of pictures that the rank of G (D, p) shows; None where no gap shows a rank.

    G has rank N B, less where patches are equal or combinations of others. There its singular
    values drop by the factor GAP at least, down to the noise.
    """
    s = torch.linalg.svdvals(total).clamp_min(rounding_of(total, precision))
    drop, place = (s[:-1] / s[1:]).max(0)
    return math.ceil((int(place) + 1) / patches) if float(drop) > GAP else None
