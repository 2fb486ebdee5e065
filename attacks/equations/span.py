r"""What uploads of one picture determine of its patches, and which directions they leave open.

One upload with hidden patches H and visible rows A_v of A: with Q an orthonormal basis of the row
space of A_v,

    (I - Q Q^T) G  has row space  S = span{x_j : j in H},  orthonormal basis B (k, p),
    C = lstsq(A_v^T, G (I - B^T B))  gives each visible patch but for its part in S.

So (I - B^T B) x_i is known for every patch: row i of C where visible, zero where hidden. Where
dL/dE_unk is sent, the sum of the hidden rows, it is one more pixel that is 1 in every patch: then
S shrinks to the differences x_j - x_j' of hidden patches, and row i of C is c, a point of their
hull, where hidden. Several uploads with different masks, each with its own S_r, are added up:

    M x_i = sum_r c_{r,i},     M = sum_r (I - B_r^T B_r),

and directions in which M vanishes stay open: those of the patches that were hidden every time.

Block 0's first layer has further equations for the patches, with dL/dE_pos or without it. It sees
n_i = gamma * (z_i - mean(z_i)) / s_i + b, the LayerNorm of z_i = W x_i + beta + e_i, so that

    blocks.0.attn.qkv.weight.grad = sum_i d_i n_i^T

has as its row space the span of the T tokens' n_i. With P the rows of an orthonormal basis of the
complement (T < D), P n_i = 0, which is linear in x_i and in the scalar s_i:

    P diag(gamma) (I - 11^T / D) (W x_i + beta + e_i) + s_i P b = 0.            (*)

With x_i = c_i + a_i B as known so far (without dL/dE_pos c = 0 and B the row space of
patch_embed.proj.weight.grad), (*) is a small system in a_i and s_i whose matrix is the same for
every patch. Masked patches share E_unk, so the differences of any two of them stay open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.equations import PATCH, QKV, TABLE, UNKNOWN
from attacks.equations.patch_system import (
    PatchSystem,
    error_of,
    gradient,
    least_squares,
    no_gradient,
    patch_rows,
    too_few_equations,
    weights,
)
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Refusal
from mjp_privacy.models import MJPVisionTransformer

OPEN = 1e-6
"""Eigenvalue of M below which a direction counts as open. It is the squared sine of an angle
between spans, which float32 gradients determine to about 1e-6: an eigenvalue of 1e-12."""

SURE = 3.0
"""Times by which an eigenvalue of M must exceed what errors of the spans make of it. An open
direction that passes for a determined one is filled with noise, magnified by its inverse."""

ABOVE_NOISE = 10
"""A direction counts from so many times the first singular value that should be 0. Where patches
are equal, the noise in their place reaches 5 times that; true directions begin at 20 times."""


@dataclass(frozen=True)
class Knowledge:
    """x_i = known_i + a_i B with a_i undetermined, for every patch of one picture; float64."""

    known: Tensor  # (N, p): C of one upload, orthogonal to the basis
    basis: Tensor  # B (q, p) orthonormal rows, q may be 0
    hidden: Tensor  # (N,) bool: hidden in every upload
    doubt: Tensor | None = None
    """F (q, q) of one upload: the expected squared sine between a direction b B of the span and its
    estimate is b F b^T; None where the errors of A and G are not known."""


def upload_span(
    system: PatchSystem, index: int, *, above_noise: float = 0.0, error: float = 0.0
) -> Knowledge:
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
        inside, r = turned[: len(visible)], r[: len(visible)]
        inside = inside - (inside @ basis.mT) @ basis
        if bool((r.diagonal() == 0).any()):  # dependent rows, as where quantisation leaves a zero
            solved = least_squares(r.mT, inside)
        else:
            solved = torch.linalg.solve_triangular(r, inside, upper=True)
        complement[~hidden] = solved - (solved @ basis.mT) @ basis
    if not error:
        return Knowledge(complement, basis, hidden)
    mixed = turned[len(visible) :] @ basis.mT  # (D, k): errors turn what is weaker there the more
    strengths, vectors = torch.linalg.eigh(mixed.mT @ mixed)
    least = error**2 * (basis.shape[1] - len(basis))
    doubt = vectors * (least / strengths.clamp_min(least)) @ vectors.mT
    return Knowledge(complement, basis, hidden, doubt)


def off_rows(columns: Tensor, rows: Tensor) -> Tensor:
    """(I - Q Q^T) columns (D, K): their part outside the span of rows (R, D)."""
    q = torch.linalg.qr(rows.mT).Q
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


def combine(spans: Sequence[Knowledge]) -> Knowledge:
    """What several uploads of one picture determine together."""
    if len(spans) == 1:
        return spans[0]
    total = torch.stack([span.known for span in spans]).sum(0)
    # M is len(spans) where no span reaches, so that only their sum needs to be decomposed.
    shared, vectors = torch.linalg.svd(
        torch.cat([span.basis for span in spans]), full_matrices=False
    )[1:]
    values = len(spans) - shared.square()
    doubt = torch.zeros_like(values)  # what errors of the spans alone would make of them
    for span in spans:
        if span.doubt is not None:
            along = vectors @ span.basis.mT
            doubt += (along @ span.doubt * along).sum(1)
    determined = values > OPEN + SURE * doubt
    inverse = torch.where(determined, 1 / values.clamp_min(OPEN), 0.0)
    along = total @ vectors.mT
    solved = total / len(spans) + (along * (inverse - 1 / len(spans))) @ vectors
    hidden = torch.stack([span.hidden for span in spans]).all(0)
    return Knowledge(solved, vectors[~determined], hidden)


# block 0's equations ------------------------------------------------------------------------------


WEIGHTS = (
    *(TABLE, UNKNOWN, "index_embed", PATCH, "patch_embed.proj.bias"),
    *("blocks.0.norm1.weight", "blocks.0.norm1.bias"),
)
MARGIN = 3.0  # factor by which a singular value must exceed the gradient's rounding to count
TRUSTED = 0.05  # share of the right sides that (*) may leave unexplained
WEAKEST = 0.05  # largest noise over the weakest token's singular value, where (*) cannot be checked
TINY = 1e-300
FITS = 0.1  # a patch counts as masked if E_unk leaves less than this share of e_i's residual of (*)


@dataclass(frozen=True)
class TokenEquations:
    """(*) of one picture of one upload: system @ (W x + offset) + s * shift = 0; float64."""

    system: Tensor  # P diag(gamma) (I - 11^T / D), (D - T, D)
    shift: Tensor  # P b, (D - T,)
    weight: Tensor  # W (D, p)
    own: Tensor  # beta + e_i, (N, D)
    unknown: Tensor | None  # beta + E_unk (+ index embedding), (N, D)
    error: float  # relative error of the system from the gradient's rounding
    noise: float  # the first singular value that should be zero, over the weakest token's

    def residual_matrix(self, basis: Tensor) -> Tensor:
        """The matrix (D - T, q + 1) of the unknowns: a for each row of `basis` (q, p), then s."""
        return torch.cat((self.system @ (self.weight @ basis.mT), self.shift.unsqueeze(1)), 1)

    def right_side(self, known: Tensor, added: Tensor) -> Tensor:
        """The right sides (D - T, N) for known parts c (N, p) and embeddings `added` (N, D)."""
        return -self.system @ (known @ self.weight.mT + added).mT


def lacks_token_equations(view: AttackerView, update: ClientUpdate) -> Refusal | None:
    """Why the equations (*) cannot be set up for an upload, or None."""
    model = view.model
    block = next(iter(getattr(model, "blocks", ())), None)
    norm = getattr(block, "norm1", None)
    if model.first_block != "intact" or not isinstance(norm, torch.nn.LayerNorm):
        return Refusal("block", "block 0 has no LayerNorm before its attention")
    if (refusal := sees_a_norm(model)) is not None:
        return refusal
    if model.pos_embed is None:
        return Refusal(
            "positions", "the model has no table of positions, so nothing tells its patches apart"
        )
    if update.batch != 1:
        return Refusal(
            "batch", f"the tokens of {update.batch} pictures share one span; batch 1 is needed"
        )
    if QKV not in update.grads:
        return no_gradient(model, QKV)
    # P has a row, and one to spare, only if the tokens leave two of the D dimensions free.
    extra = model.tokens + 2 - model.grid.patches
    return too_few_equations(model, extra=extra, who="block 0's equations")


def sees_a_norm(model: MJPVisionTransformer) -> Refusal | None:
    """Why block 0's input is not W x_i + beta + e_i, or None."""
    if any(model.patch_norms):
        return Refusal("block", "patches are normalised where they are embedded")
    if model.other_tokens:
        return Refusal("block", model.other_tokens)
    if isinstance(getattr(model, "norm_pre", None), torch.nn.Identity | None):
        return None
    return Refusal(
        "block", "block 0 does not see W x + e itself: the model normalises it first (ln_pre)"
    )


def token_equations(
    view: AttackerView, update: ClientUpdate, index: int, batch: int = 1
) -> TokenEquations:
    """(*) for the step at `index` of `batch` pictures, from its upload and the weights that the
    client used; pictures share the tokens that are not of patches."""
    known = weights(view, update)
    state = {name: known[name].double() for name in WEIGHTS if name in known}
    patches = view.model.grid.patches
    tokens = view.model.tokens + (batch - 1) * patches
    sent = gradient(view, update, QKV)[index]
    values, vectors = torch.linalg.svd(sent, full_matrices=sent.shape[0] < sent.shape[1])[1:]
    rest = vectors[tokens:]
    width = rest.shape[1]
    centring = torch.eye(width).to(rest) - 1 / width
    scale = state.get("blocks.0.norm1.weight", torch.ones(width).to(rest))
    added = state.get("patch_embed.proj.bias", torch.zeros_like(scale)).expand(patches, -1)
    if "index_embed" in state:
        added = added + state["index_embed"][0, 1:]
    # The first singular value that should be zero shows the gradient's own noise. Its ratio to the
    # weakest token's is the error of that token's direction, of which a generic direction of D sees
    # 1 / sqrt(D). A defence's known noise counts too, whatever that singular value is.
    edge = noise_edge(float(error_of(update, QKV)[index]), *sent.shape)
    noise = max(float(values[tokens]), edge) / max(float(values[tokens - 1]), TINY)
    return TokenEquations(
        (rest * scale) @ centring,
        rest @ state.get("blocks.0.norm1.bias", torch.zeros_like(scale)),
        state[PATCH].flatten(1),
        added + patch_rows(view.model, state[TABLE].reshape(1, -1, width))[0],
        added + state[UNKNOWN][0] if UNKNOWN in state else None,
        noise / math.sqrt(width),
        noise,
    )


def refine(span: Knowledge, equations: TokenEquations) -> Knowledge:
    """The span with fewer open directions by (*), or as it is where (*) does not hold for it.

    `span.hidden` says which patches have E_unk added in place of their own e_i.
    """
    if not len(span.basis):
        return span
    added = equations.own
    if equations.unknown is not None:
        added = torch.where(span.hidden.unsqueeze(1), equations.unknown, added)
    matrix = equations.residual_matrix(span.basis)
    right = equations.right_side(span.known, added)
    if not _trusted(matrix, right[:, ~span.hidden], equations):
        return span
    u, values, vh = torch.linalg.svd(matrix, full_matrices=True)
    rank = int((values > MARGIN * equations.error * values[0]).sum())
    inverse = vh[:rank].mT / values[:rank]
    solved = (inverse @ (u[:, :rank].mT @ right)).mT  # (a, s) (N, q + 1) of minimum norm
    still_open = torch.linalg.svd(vh[rank:, :-1], full_matrices=False)  # s is dropped
    basis = still_open.Vh[still_open.S > 1e-9] @ span.basis
    known = span.known + solved[:, :-1] @ span.basis
    return replace(span, basis=basis, known=known - (known @ basis.mT) @ basis)


def from_tokens_alone(rows: Tensor, equations: TokenEquations, edge: float) -> Knowledge:
    """The span without dL/dE_pos: x_i = a_i B, B the row space of G = `rows` (D, p).

    `edge` is the singular value that known noise alone would reach. Where it exceeds the weakest of
    B's, the row space cannot be told from noise, and every direction stays open.

    Positions whose own e_i leaves a residual that E_unk does not are the masked ones. Where (*) has
    too few equations to tell, no position counts as masked.
    """
    patches = len(equations.own)
    _, values, basis = torch.linalg.svd(rows, full_matrices=False)
    basis = basis[: min(patches, *rows.shape)]
    if values[len(basis) - 1] < edge:
        basis = torch.eye(rows.shape[1]).to(rows)
    zeros = torch.zeros(patches, rows.shape[1]).to(rows)
    matrix = equations.residual_matrix(basis)
    hidden = torch.zeros(patches, dtype=torch.bool, device=rows.device)
    if equations.unknown is not None:
        misfits = []
        for added in (equations.own, equations.unknown):
            right = equations.right_side(zeros, added)
            noise = MARGIN * equations.error * float(right.norm(dim=0).mean())
            misfits.append(_unreached(matrix, right, equations.error)[0].clamp_min(noise))
        hidden = misfits[1] < FITS * misfits[0]
    return refine(Knowledge(zeros, basis, hidden), equations)


def _trusted(matrix: Tensor, right: Tensor, equations: TokenEquations) -> bool:
    """Whether (*) holds for the visible patches, whose right sides are `right` (D - T, n).

    P is orthogonal to every token only if each token shows in the gradient (or equals another). In
    a model of one block d_1 ... d_T are dependent, and rows of P are noise. Where there are more
    equations than unknowns, this shows in how much of the right sides is left unexplained.
    """
    rest, rank = _unreached(matrix, right, equations.error)
    if rank == len(matrix) or not right.shape[1]:
        return equations.noise < WEAKEST
    return bool((rest / right.norm(dim=0).clamp_min(TINY)).median() < TRUSTED)


def _unreached(matrix: Tensor, right: Tensor, error: float) -> tuple[Tensor, int]:
    """(N,) norm of the part of each right side that the matrix cannot reach, and its rank."""
    u, values = torch.linalg.svd(matrix, full_matrices=False)[:2]
    reach = u[:, values > MARGIN * error * values[0]]
    return (right - reach @ (reach.mT @ right)).norm(dim=0), reach.shape[1]
