r"""What uploads of one picture determine of its patches, and which directions they leave open.

One upload with hidden patches H and visible rows A_v of A: with Q an orthonormal basis of the row
space of A_v,

    (I - Q Q^T) G  has row space  S = span{x_j : j in H},  orthonormal basis B (k, p),
    C = lstsq(A_v^T, G (I - B^T B))  gives each visible patch but for its part in S.

So (I - B^T B) x_i is known for every patch: row i of C where visible, zero where hidden. Where
dL/dE_unk is sent, the sum of the hidden rows, it is one more pixel that is 1 in every patch. The
same algebra then gives the hull of the hidden patches, c + span{x_j - x_j'}: S shrinks to their
differences, so that equal patches, such as the bars of a letterbox, leave nothing open, and row i
of C is c where hidden. Several uploads of the same picture with different masks, each with its own
S_r, are added up:

    M x_i = sum_r c_{r,i},     M = sum_r (I - B_r^T B_r),

which takes one eigen-decomposition for all patches. Directions in which M vanishes stay open. For
generic patches their number is that of the patches that were hidden every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.equations.least_squares import minimum_norm_solve
from attacks.equations.patch_system import PatchSystem

OPEN = 1e-6
"""Eigenvalue of M below which a direction counts as open. It is the squared sine of an angle
between spans, which float32 gradients determine to about 1e-6: an eigenvalue of 1e-12."""

SURE = 3.0
"""Times by which an eigenvalue of M must exceed what errors of the spans make of it. An open
direction that passes for a determined one is filled with noise, magnified by one over the
eigenvalue: several uploads in half precision were worse than one."""

ABOVE_NOISE = 10
"""A direction counts from so many times the first singular value that should be 0. Where patches
are equal, the noise in their place reaches 5 times that; true directions begin at 20 times."""


@dataclass(frozen=True)
class Knowledge:
    """x_i = known_i + a_i B with a_i undetermined, for every patch of one picture; float64."""

    known: Tensor  # (N, p), orthogonal to the basis
    basis: Tensor  # (q, p) orthonormal rows, q may be 0
    hidden: Tensor  # (N,) bool: hidden in every upload


@dataclass(frozen=True)
class UploadSpan:
    """What one upload determines of one picture."""

    basis: Tensor  # B (k, p)
    complement: Tensor  # (N, p): C; where hidden, c
    hidden: Tensor  # (N,)
    doubt: Tensor | None = None
    """F (k, k): the expected squared sine between a direction b B of the span and its estimate is
    b F b^T; None where the errors of A and G are not known."""


def upload_span(
    system: PatchSystem, index: int, *, above_noise: float = 0.0, error: float = 0.0
) -> UploadSpan:
    """B and C of the picture at `index` of the system; `above_noise` as in `masked_basis`, `error`
    the known standard deviation of an entry of G."""
    hidden, total = system.hidden[index], system.total[index]
    visible = system.rows[index][~hidden]
    complement = torch.zeros(len(hidden), total.shape[-1]).to(total)
    q, r = torch.linalg.qr(visible.mT, mode="complete")
    turned = q.mT @ total  # first what the visible rows span, then what they leave over
    count, free = int(hidden.sum()), turned[len(visible) :]
    if system.hidden_sum is None or not count:
        basis = masked_basis(free, count, above_noise)
    else:
        sums = q.mT @ system.hidden_sum[index].unsqueeze(1)
        basis, anchor = split_hull(hull_rows(free, sums[len(visible) :], count, above_noise))
        complement[hidden] = anchor
        turned = turned - sums * anchor  # as if every hidden patch were its difference from it
    if len(visible):
        inside = turned[: len(visible)]
        solved = _solved(visible, r[: len(visible)], inside - (inside @ basis.mT) @ basis)
        complement[~hidden] = solved - (solved @ basis.mT) @ basis
    doubt = _doubt(turned[len(visible) :] @ basis.mT, basis, error) if error else None
    return UploadSpan(basis, complement, hidden, doubt)


def _doubt(mixed: Tensor, basis: Tensor, error: float) -> Tensor:
    """F of `UploadSpan`, from what the visible rows leave of G in the basis, (D, k): errors turn a
    direction the more the weaker it is there."""
    strengths, vectors = torch.linalg.eigh(mixed.mT @ mixed)
    least = error**2 * (basis.shape[1] - len(basis))
    return vectors * (least / strengths.clamp_min(least)) @ vectors.mT


def _solved(visible: Tensor, r: Tensor, inside: Tensor) -> Tensor:
    """The least-squares solution X (k, p) of r X = inside, where q r = visible^T (D, k); of minimum
    norm where the rows are dependent, as when quantisation leaves one of them zero."""
    if bool((r.diagonal() == 0).any()):
        return minimum_norm_solve(r.mT.unsqueeze(0), inside.unsqueeze(0))[0][0]
    return torch.linalg.solve_triangular(r, inside, upper=True)


def off_the_visible(system: PatchSystem, index: int, columns: Tensor) -> Tensor:
    """(I - Q Q^T) columns (D, K): their part outside the span of the visible rows of A."""
    q = torch.linalg.qr(system.rows[index][~system.hidden[index]].mT).Q
    return columns - q @ (q.mT @ columns)


def noise_edge(deviation: float, free: int, length: int) -> float:
    """The largest singular value to expect of a (free, length) matrix of noise alone."""
    return deviation * (math.sqrt(free) + math.sqrt(length))


def masked_basis(projected: Tensor, masked: int, above_noise: float = ABOVE_NOISE) -> Tensor:
    """Orthonormal rows (k, p) of the span of `masked` patches from H (D, p); float64.

    Directions below `above_noise` times the noise, which the singular values beyond the masked-th
    show, are left out, so k is less than `masked` where patches are equal or combinations of
    others. `above_noise` 0 keeps all: a direction too many is one more open direction, while a
    missing direction that a weak patch needs makes an equation wrong, which spoils the result of
    several uploads.
    """
    if not masked or not len(projected):  # as many visible rows as the model is wide
        return projected.new_zeros(0, projected.shape[1]).double()
    _, s, vh = torch.linalg.svd(projected.double(), full_matrices=False)
    floor = s[masked] if masked < len(s) else s[0] * torch.finfo(torch.float32).eps
    return vh[:masked][s[:masked] > above_noise * floor]


def hull_rows(
    projected: Tensor, sums: Tensor, masked: int, above_noise: float = ABOVE_NOISE
) -> Tensor:
    """Orthonormal rows (k, p + 1) of the span of (x_j, 1) for `masked` patches x_j, from
    H = A_H^T X_H (D, p) and sums = A_H^T 1 (D, 1): a pixel whose value is 1 in every patch."""
    return masked_basis(torch.cat((projected, sums), 1), masked, above_noise)


def split_hull(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows (k-1, p) of the patches' differences, and the point (p,) of their hull that
    is orthogonal to these, from `hull_rows`: the differences are the vectors that end with 0."""
    rows, last = wide[:, :-1], wide[:, -1:]
    if not bool(last.any()):
        return rows, rows.new_zeros(rows.shape[1])
    turn = torch.linalg.qr(last, mode="complete").Q  # first along `last`, then across it
    return turn[:, 1:].mT @ rows, (last * rows).sum(0) / last.square().sum()


def combine(spans: Sequence[UploadSpan]) -> Knowledge:
    """What several uploads of one picture determine together."""
    if len(spans) == 1:
        return Knowledge(spans[0].complement, spans[0].basis, spans[0].hidden)
    total = torch.stack([span.complement for span in spans]).sum(0)
    # M is len(spans) where no span reaches, so that only their sum needs to be decomposed.
    shared, vectors = torch.linalg.svd(
        torch.cat([span.basis for span in spans]), full_matrices=False
    )[1:]
    values = len(spans) - shared.square()
    determined = values > OPEN + SURE * _doubt_along(spans, vectors)
    inverse = torch.where(determined, 1 / values.clamp_min(OPEN), 0.0)
    along = total @ vectors.mT
    solved = total / len(spans) + (along * (inverse - 1 / len(spans))) @ vectors
    hidden = torch.stack([span.hidden for span in spans]).all(0)
    return Knowledge(solved, vectors[~determined], hidden)


def _doubt_along(spans: Sequence[UploadSpan], vectors: Tensor) -> Tensor:
    """(q,) what the errors of the spans alone would make of M's eigenvalue for each direction."""
    doubt = vectors.new_zeros(len(vectors))
    for span in spans:
        if span.doubt is not None:
            along = vectors @ span.basis.mT
            doubt += (along @ span.doubt * along).sum(1)
    return doubt
