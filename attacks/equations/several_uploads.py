r"""Several uploads of one picture that has more patches N than the width D determine it together.

Upload r says A_r^T X = G_r, A_r (N, D) the rows of all patches, of which those of the hidden ones,
H_r, are unknown but for their sum u_r. One upload has too few equations. But the rows of all G_r
span the patches: with B (R, p) an orthonormal basis of that span, X = Y B and G_r = F_r B,

    A_r^T Y = F_r,    so with Z = Y^-1    F_r z_i = a_{r,i}    for every patch i visible in upload r

and F_r sum_{i in H_r} z_i = u_r: linear equations for the columns of Z, of which each upload gives
D. A patch that is visible in N / D uploads is determined by itself, others by the sums they stand
in. Then the hidden rows are F_r z_i too, and where these complete enough uploads, A^T X = G over
all of them gives X as of clients that hide nothing. Otherwise, with Z_d the columns and sums of
columns that are determined and E_d what they stand for,

    Y Z_d = E_d,     X = E_d pinv(Z_d) B + T B_0,    B_0 = (what is orthogonal to Z_d) B,

so that as many directions stay open as columns are missing.

Patches that are combinations of others (R < N), as equal ones are, have no z_i: their equations
contradict each other, and they count as missing. So do all where uploads of the same weights that
hide nothing repeat each other, and of more than p patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.equations.patch_system import PatchSystem, least_squares
from attacks.equations.span import ABOVE_NOISE, Knowledge, combine, upload_span

FITS = 1e-3
"""Share of a right side that equations for columns of Z may leave before they contradict: of
photographs in float32 they leave 3e-5 at most, of equal patches a tenth and more."""
NOTHING = 1e-5  # share of the largest singular value at which others count as zero


@dataclass(frozen=True)
class _Uploads:
    """All uploads of one picture in the basis of its patches' span; float64."""

    basis: Tensor  # B (R, p)
    turned: Tensor  # F (K, D, R)
    rows: Tensor  # A (K, N, D), hidden rows zero
    total: Tensor  # G (K, D, p)
    hidden: Tensor  # (K, N) bool
    sums: Tensor | None  # u (K, D)
    noise: float  # what singular values of F must exceed


@dataclass(frozen=True)
class _Columns:
    """Z (R, N) as far as it is known: column i is fixed_i + loose_i c, with one unknown c."""

    fixed: Tensor  # (R, N)
    loose: dict[int, Tensor]  # (R, f) of the columns that are not determined
    lost: Tensor  # (N,) bool: nothing is known of this column


@dataclass(frozen=True)
class SeveralUploads:
    """What several uploads of one picture determine of its patches, and of the rows of A."""

    knowledge: Knowledge
    rows: Tensor  # A (K, N, D) with the hidden rows that are determined
    total: Tensor  # G (K, D, p)
    unknown: Tensor  # (K, N) bool: the rows that are not
    sums: Tensor | None  # (K, D) of the unknown rows

    def finished(self, patches: Tensor, exact: Tensor) -> Tensor:
        """The patches (N, p) where those that are `exact` (N,) bool determine the others: with them
        taken out of G, the uploads have so few patches left that their spans intersect. As they
        are where these do not."""
        exact = exact & ~self.unknown.any(0)
        rest = ~exact
        if not bool(exact.any()) or not 0 < int(rest.sum()) <= self.rows.shape[2]:
            return patches
        left_over = self.total - self.rows[:, exact].mT @ patches[exact]
        system = PatchSystem(self.rows[:, rest], left_over, self.unknown[:, rest], self.sums)
        span = combine([upload_span(system, upload) for upload in range(len(self.rows))])
        if len(span.basis):
            return patches
        made = patches.clone()
        made[rest] = span.known
        return made


def several_uploads(systems: Sequence[PatchSystem], index: int) -> SeveralUploads:
    """What the uploads determine of the picture at `index`. All directions of its patches are open
    where they determine none."""
    uploads = _in_their_span(systems, index)
    columns = _by_sums(uploads, _by_themselves(uploads))
    known = ~columns.lost
    known[list(columns.loose)] = False
    found = (uploads.turned @ columns.fixed).mT
    rows = torch.where((uploads.hidden & known).unsqueeze(-1), found, uploads.rows)
    unknown = uploads.hidden & ~known
    sums = uploads.sums
    if sums is not None:
        sums = sums - (rows * uploads.hidden.unsqueeze(-1)).sum(1)
    knowledge = _all_rows(uploads, rows[~unknown.any(1)], ~unknown.any(1))
    if knowledge is None:
        knowledge = _by_columns(uploads, columns, known)
    return SeveralUploads(knowledge, rows, uploads.total, unknown, sums)


def _all_rows(uploads: _Uploads, rows: Tensor, whole: Tensor) -> Knowledge | None:
    """The patches by the uploads, `whole` (K,) bool, of which all rows (k, N, D) are known; None
    where these do not determine them."""
    stacked = rows.transpose(0, 1).flatten(1)
    strengths = torch.linalg.svdvals(stacked)
    if _rank(strengths) < len(stacked) or strengths[-1] <= uploads.noise:
        return None
    patches = least_squares(stacked, uploads.total[whole].flatten(0, 1))
    return Knowledge(patches, uploads.basis[:0], uploads.hidden.all(0))


def _by_columns(uploads: _Uploads, columns: _Columns, known: Tensor) -> Knowledge:
    """The patches by the columns of Z that are `known` (N,) bool, and sums of loose ones."""
    identity = torch.eye(len(known)).to(uploads.basis)
    weights = [identity[:, known]]
    if columns.loose:  # sums of columns in which nothing is loose
        apart = torch.stack([part.flatten() for part in columns.loose.values()])
        left, values = torch.linalg.svd(apart, full_matrices=False)[:2]
        weights.append(identity[:, list(columns.loose)] @ left[:, _rank(values) :])
    stand_for = torch.cat(weights, 1)  # E_d
    left, values, right = torch.linalg.svd(columns.fixed @ stand_for)
    always, count = uploads.hidden.all(0), stand_for.shape[1]
    if not count or _rank(values) < count:  # dependent ones are no columns of an inverse
        everything = torch.eye(uploads.total.shape[2]).to(identity)
        return Knowledge(torch.zeros_like(identity[:, :1] * everything[:1]), everything, always)
    inverse = right.mT / values @ left[:, :count].mT
    basis = left[:, count:].mT @ uploads.basis
    return Knowledge(stand_for @ inverse @ uploads.basis, basis, always)


def _rank(values: Tensor) -> int:
    """How many singular values, in descending order, are more than nothing."""
    return int((values > NOTHING * values[:1]).sum())


def _in_their_span(systems: Sequence[PatchSystem], index: int) -> _Uploads:
    """The uploads of the picture at `index`. Directions below the noise, which singular values
    beyond the N-th show, are left out."""
    total = torch.stack([system.total[index] for system in systems])
    rows = torch.stack([system.rows[index] for system in systems])
    sums = [system.hidden_sum[index] for system in systems if system.hidden_sum is not None]
    patches = rows.shape[1]
    values, basis = torch.linalg.svd(total.flatten(0, 1), full_matrices=False)[1:]
    noise = ABOVE_NOISE * float(values[patches]) if patches < len(values) else 0.0
    basis = basis[:patches][values[:patches] > noise]
    return _Uploads(
        basis,
        total @ basis.mT,
        rows,
        total,
        torch.stack([system.hidden[index] for system in systems]),
        torch.stack(sums) if len(sums) == len(systems) else None,
        noise,
    )


def _by_themselves(uploads: _Uploads) -> _Columns:
    """Each column by the rows of its own patch; loose in directions that are all its own."""
    fixed = torch.zeros(len(uploads.basis), uploads.hidden.shape[1]).to(uploads.basis)
    loose = dict[int, Tensor]()
    lost = torch.zeros_like(uploads.hidden[0])
    visible = ~uploads.hidden
    for seen in torch.unique(visible, dim=1).mT:  # of patches that the same uploads show
        alike = (visible == seen.unsqueeze(1)).all(0)
        matrix = uploads.turned[seen].flatten(0, 1)
        right = uploads.rows[seen][:, alike].transpose(1, 2).flatten(0, 1)
        left, values, vectors = torch.linalg.svd(
            matrix, full_matrices=len(matrix) < matrix.shape[1]
        )
        rank = int((values > uploads.noise).sum())
        along = left[:, :rank].mT @ right
        fixed[:, alike] = vectors[:rank].mT @ (along / values[:rank].unsqueeze(1))
        lost[alike] = (right - left[:, :rank] @ along).norm(dim=0) > FITS * right.norm(dim=0)
        if rank < len(vectors):
            loose |= dict.fromkeys(alike.nonzero()[:, 0].tolist(), vectors[rank:].mT)
    return _Columns(fixed, {i: part for i, part in loose.items() if not lost[i]}, lost)


def _by_sums(uploads: _Uploads, columns: _Columns) -> _Columns:
    """The same with the sums of hidden rows. Loose columns are lost where these say nothing."""
    at = list(columns.loose)
    lost = columns.lost.clone()
    lost[at] = True
    none = _Columns(columns.fixed, {}, lost)
    usable = ~(uploads.hidden & columns.lost).any(1)
    turned, hidden = uploads.turned[usable], uploads.hidden[usable].to(uploads.basis)
    unknowns = sum(part.shape[1] for part in columns.loose.values())
    if uploads.sums is None or not 0 < unknowns <= turned[..., 0].numel():
        return none
    parts = [(turned @ columns.loose[i]) * hidden[:, i].reshape(-1, 1, 1) for i in at]
    matrix = torch.cat(parts, -1).flatten(0, 1)
    right = uploads.sums[usable] - (turned @ (columns.fixed @ hidden.mT).mT.unsqueeze(-1))[..., 0]
    right = right.flatten()
    left, values, vectors = torch.linalg.svd(matrix, full_matrices=len(matrix) < matrix.shape[1])
    rank = int((values > uploads.noise).sum())
    along = left[:, :rank].mT @ right
    if (right - left[:, :rank] @ along).norm() > FITS * uploads.sums[usable].norm():
        return none
    solved, still = vectors[:rank].mT @ (along / values[:rank]), vectors[rank:].mT
    fixed, loose = columns.fixed.clone(), dict[int, Tensor]()
    sizes = [columns.loose[i].shape[1] for i in at]
    for i, own, common in zip(at, solved.split(sizes), still.split(sizes), strict=True):
        fixed[:, i] += columns.loose[i] @ own
        if bool((common.abs() > NOTHING).any()):
            loose[i] = columns.loose[i] @ common
    return _Columns(fixed, loose, columns.lost)
