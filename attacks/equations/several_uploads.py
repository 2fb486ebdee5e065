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
contradict each other. They are taken for equal: of these the sum of all rows is known, the hidden
ones included, and has one column; where that contradicts as well they are missing. Only equations
that outnumber their unknowns count. Where R < N and none contradict, all columns are missing: then
A's rows may be dependent, not the patches, as where uploads of the same weights repeat each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.equations.patch_system import PatchSystem, least_squares
from attacks.equations.span import (
    ABOVE_NOISE,
    TINY,
    Knowledge,
    combine,
    off_rows,
    upload_span,
)

FITS = 1e-3
"""Share of a right side that equations for columns of Z may leave before they contradict: of
photographs in float32 they leave 3e-5 at most, of equal patches a tenth and more."""
SPARE = 3  # equations beyond the unknowns that hardly fit by chance; a single one did in 1 of 600
NOTHING = 1e-5  # share of the largest singular value at which others count as zero
LOOSE = 1e-3  # the same of open directions, which noise turns
CONTRADICTS = 30.0
"""Times the noise that G less exact patches exceeds what few others explain where one of them is
wrong: by a level of 8 bits 40 times and more, and 15 at most where all are right."""


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

    def tested(self, used: Tensor, rank: int) -> bool:
        """Whether equations of the uploads `used` (K,) bool exceed this rank by `SPARE`, so that
        they contradict where patches have no columns. Behind LayerNorms rows sum to zero."""
        return int(used.sum()) * (self.rows.shape[2] - 1) >= rank + SPARE


@dataclass(frozen=True)
class _Columns:
    """Columns of Z, and sums of columns, as far as they are known: z_i + L_i c, one c for all."""

    values: Tensor  # z (R, s)
    of: Tensor  # E (N, s): 1 where a patch stands in a column
    loose: dict[int, Tensor]  # {i: L_i (R, f)} of those that are not determined

    @property
    def determined(self) -> list[int]:
        """Which of them are."""
        return [at for at in range(self.of.shape[1]) if at not in self.loose]

    def without_loose(self) -> _Columns:
        """Those that are determined alone."""
        return _Columns(self.values[:, self.determined], self.of[:, self.determined], {})


@dataclass(frozen=True)
class SeveralUploads:
    """What several uploads of one picture determine of its patches, and the uploads with the hidden
    rows that are determined: `hidden` and `sums` are those of the others."""

    knowledge: Knowledge
    uploads: _Uploads

    def narrowed(self, patches: Tensor, exact: Tensor, still_open: int) -> Knowledge | None:
        """What is known if those of the patches (N, p) that are `exact` (N,) bool are: with them
        taken out of G the uploads have so few patches left that their spans intersect. None where
        no fewer than `still_open` directions stay open, or where one of the patches is wrong."""
        found = self.uploads
        exact = exact & ~found.hidden.any(0)
        rest = ~exact
        # Behind LayerNorms a row's numbers sum to zero; one more shows whether a patch is wrong.
        if not bool(exact.any()) or not 0 < int(rest.sum()) < found.rows.shape[2] - 1:
            return None
        left_over = found.total - found.rows[:, exact].mT @ patches[exact]
        system = PatchSystem(found.rows[:, rest], left_over, found.hidden[:, rest], found.sums)
        # The sum of hidden rows is like one more pixel, which is 1 in every patch.
        left = left_over if found.sums is None else torch.cat((left_over, found.sums[..., None]), 2)
        for columns, rows, hidden in zip(left, system.rows, system.hidden, strict=True):
            over = torch.linalg.svdvals(off_rows(columns, rows[~hidden]))[int(hidden.sum()) :]
            if bool((over > CONTRADICTS * found.noise).any()):
                return None
        span = combine([upload_span(system, upload) for upload in range(len(found.rows))])
        if len(span.basis) >= still_open:
            return None
        known = patches - patches @ span.basis.mT @ span.basis
        known[rest] = span.known
        return replace(self.knowledge, known=known, basis=span.basis)


def several_uploads(systems: Sequence[PatchSystem], index: int) -> SeveralUploads:
    """What the uploads determine of the picture at `index`. All directions of its patches are open
    where they determine none."""
    uploads = _in_their_span(systems, index)
    columns = _by_sums(uploads, _by_themselves(uploads))
    alone = [at for at in columns.determined if columns.of[:, at].sum() == 1]
    known = columns.of[:, alone].any(1)
    found = (uploads.turned @ columns.values[:, alone] @ columns.of[:, alone].mT).mT
    rows = torch.where((uploads.hidden & known).unsqueeze(-1), found, uploads.rows)
    unknown, sums = uploads.hidden & ~known, uploads.sums
    if sums is not None:
        sums = sums - (rows * uploads.hidden.unsqueeze(-1)).sum(1)
    whole = ~unknown.any(1)  # the uploads of which all rows are known, which may determine all
    stacked = rows[whole].transpose(0, 1).flatten(1)
    strengths = torch.linalg.svdvals(stacked)
    if _rank(strengths) < len(stacked) or strengths[-1] <= uploads.noise:
        knowledge = _by_columns(uploads, columns)
    else:
        patches = least_squares(stacked, uploads.total[whole].flatten(0, 1))
        knowledge = Knowledge(patches, uploads.basis[:0], uploads.hidden.all(0))
    return SeveralUploads(knowledge, replace(uploads, rows=rows, hidden=unknown, sums=sums))


def _by_columns(uploads: _Uploads, columns: _Columns) -> Knowledge:
    """The patches by the columns that are determined, and sums of the others in which c is not."""
    values, of = columns.values[:, columns.determined], columns.of[:, columns.determined]
    if loose := list(columns.loose):
        apart = torch.stack([part.flatten() for part in columns.loose.values()])
        left, strengths = torch.linalg.svd(apart, full_matrices=False)[:2]
        weights = left[:, _rank(strengths, LOOSE) :]
        values = torch.cat((values, columns.values[:, loose] @ weights), 1)
        of = torch.cat((of, columns.of[:, loose] @ weights), 1)
    left, strengths, right = torch.linalg.svd(values)
    always, count = uploads.hidden.all(0), values.shape[1]
    if not count or _rank(strengths) < count:  # dependent ones are no columns of an inverse
        everything = torch.eye(uploads.total.shape[2]).to(values)
        return Knowledge(torch.zeros(len(of), len(everything)).to(values), everything, always)
    inverse = right.mT / strengths @ left[:, :count].mT
    return Knowledge(of @ inverse @ uploads.basis, left[:, count:].mT @ uploads.basis, always)


def _rank(strengths: Tensor, nothing: float = NOTHING) -> int:
    """How many singular values, in descending order, are more than nothing."""
    return int((strengths > nothing * strengths[:1]).sum())


def _in_their_span(systems: Sequence[PatchSystem], index: int) -> _Uploads:
    """The uploads of the picture at `index`, each divided by its G's norm: a model that has learned
    the picture sends ten thousand times less, which would count as noise beside the others.
    Directions below the noise, which singular values beyond the N-th show, or below rounding are
    left out."""
    total = torch.stack([system.total[index] for system in systems])
    scales = total.norm(dim=(1, 2)).clamp_min(TINY)
    total = total / scales[:, None, None]
    rows = torch.stack([system.rows[index] for system in systems]) / scales[:, None, None]
    sums = [
        system.hidden_sum[index] / scale
        for system, scale in zip(systems, scales, strict=True)
        if system.hidden_sum is not None
    ]
    patches = rows.shape[1]
    values, basis = torch.linalg.svd(total.flatten(0, 1), full_matrices=False)[1:]
    rounding = torch.finfo(values.dtype).eps * max(total.flatten(0, 1).shape) * float(values[0])
    noise = max(ABOVE_NOISE * float(values[patches : patches + 1].sum()), rounding)
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
    """Each column by the rows of its own patch, loose in directions that are all its own. Patches
    whose rows contradict each other have one column together, of which nothing is known."""
    size, patches = len(uploads.basis), uploads.hidden.shape[1]
    values = torch.zeros(size, patches).to(uploads.basis)
    loose, fits = dict[int, Tensor](), True
    contradict, visible = torch.zeros_like(uploads.hidden[0]), ~uploads.hidden
    for seen in torch.unique(visible, dim=1).mT:  # of patches that the same uploads show
        alike = (visible == seen.unsqueeze(1)).all(0)
        solved, opened, misfit = _solved(
            uploads.turned[seen].flatten(0, 1),
            uploads.rows[seen][:, alike].transpose(1, 2).flatten(0, 1),
            uploads.noise,
        )
        fits &= bool((misfit <= FITS).all())
        untested = not opened.shape[1] and not uploads.tested(seen, size)
        values[:, alike], contradict[alike] = solved, (misfit > FITS) | untested
        loose |= dict.fromkeys(alike.nonzero()[:, 0].tolist(), opened)
    if fits and size < patches:
        return _Columns(values[:, :0], torch.eye(patches).to(values)[:, :0], {})
    kept = (~contradict).nonzero()[:, 0].tolist()
    left_open = {at: loose[patch] for at, patch in enumerate(kept) if loose[patch].shape[1]}
    values, of = values[:, kept], torch.eye(patches).to(values)[:, kept]
    if bool(contradict.any()):
        left_open[len(kept)] = torch.eye(size).to(values)
        values = torch.nn.functional.pad(values, (0, 1))
        of = torch.cat((of, contradict.to(of).unsqueeze(1)), 1)
    return _Columns(values, of, left_open)


def _by_sums(uploads: _Uploads, columns: _Columns) -> _Columns:
    """The same with the sums of hidden rows: a patch stands in those of uploads that hide it. The
    patches of one column are taken for equal ones, of which only the sum of all rows counts, and
    then visible rows count as well. Without loose columns where the sums contradict."""
    sizes = [part.shape[1] for part in columns.loose.values()]
    if uploads.sums is None or not 0 < sum(sizes) <= uploads.sums.numel():
        return columns.without_loose()
    equal = columns.of.sum(0) > 1
    stands = torch.where(equal, 1.0, uploads.hidden.to(columns.of) @ columns.of)  # (K, s)
    parts = [
        uploads.turned @ part * stands[:, at].reshape(-1, 1, 1)
        for at, part in columns.loose.items()
    ]
    visible = (uploads.rows * columns.of[:, equal].sum(1, keepdim=True)).sum(1)
    rest = uploads.sums + visible - (uploads.turned @ columns.values * stands.unsqueeze(1)).sum(2)
    solved, still, misfit = _solved(
        torch.cat(parts, -1).flatten(0, 1), rest.reshape(-1, 1), uploads.noise
    )
    tested = uploads.tested(stands.any(1), sum(sizes) - still.shape[1])
    if not tested or float(misfit * rest.norm() / uploads.sums.norm()) > FITS:
        return columns.without_loose()
    values, loose = columns.values.clone(), dict[int, Tensor]()
    unknowns = zip(solved[:, 0].split(sizes), still.split(sizes), strict=True)
    for (at, part), (own, common) in zip(columns.loose.items(), unknowns, strict=True):
        values[:, at] += part @ own
        if bool((common.abs() > LOOSE).any()):
            loose[at] = part @ common
    return _Columns(values, columns.of, loose)


def _solved(matrix: Tensor, right: Tensor, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """The x (R, k) of least norm with matrix x = right (m, k), orthonormal columns (R, f) of what
    that leaves open, and the share (k,) of each right side that it leaves over."""
    left, strengths, vectors = torch.linalg.svd(matrix, full_matrices=len(matrix) < matrix.shape[1])
    rank = int((strengths > noise).sum())
    along = left[:, :rank].mT @ right
    solved = vectors[:rank].mT @ (along / strengths[:rank].unsqueeze(1))
    over = (right - left[:, :rank] @ along).norm(dim=0)
    return solved, vectors[rank:].mT, over / right.norm(dim=0).clamp_min(TINY)
