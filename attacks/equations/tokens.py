r"""Equations for the patches from block 0's first layer, with dL/dE_pos or without it.

Attention sees n_i = gamma * (z_i - mean(z_i)) / s_i + b, the LayerNorm of z_i = W x_i + beta + e_i,
and the gradient of its first layer is a sum over tokens,

    blocks.0.attn.qkv.weight.grad = sum_i d_i n_i^T,

so its row space is the span of the tokens' n_i (T = N + 1; one more with a distillation token,
whose own z is not needed). With P the rows of an orthonormal basis
of the complement (T < D), P n_i = 0 for every token, which is linear in x_i and in the scalar s_i:

    P diag(gamma) (I - 11^T / D) (W x_i + beta + e_i) + s_i P b = 0.            (*)

Let x_i = c_i + a_i B be what is already known: `equations.span`'s result or, without dL/dE_pos, the
row space of patch_embed.proj.weight.grad (c = 0). Then (*) is a small system in a_i and s_i whose
matrix is the same for every patch, and it reduces the open directions. Masked patches share E_unk,
so the differences of any two of them stay open; visible patches differ in their e_i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.equations import PATCH, QKV, TABLE, UNKNOWN
from attacks.equations.patch_system import (
    error_of,
    gradient,
    no_gradient,
    too_few_equations,
    weights,
)
from attacks.equations.span import UploadSpan, noise_edge
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Refusal
from mjp_privacy.models import MJPVisionTransformer

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


def lacks_tokens(view: AttackerView, update: ClientUpdate) -> Refusal | None:
    """Why the equations (*) cannot be set up for an upload, or None."""
    model = view.model
    if model.first_block != "intact" or not isinstance(
        getattr(model.blocks[0], "norm1", None), torch.nn.LayerNorm
    ):
        return Refusal("block", "block 0 has no LayerNorm before its attention")
    if (refusal := sees_a_norm(model)) is not None:
        return refusal
    if model.pos_embed is None:
        return Refusal(
            "positions", "the model has no position embeddings, so nothing tells its patches apart"
        )
    if update.batch != 1:
        return Refusal(
            "batch", f"the tokens of {update.batch} pictures share one span; batch 1 is needed"
        )
    if QKV not in update.grads:
        return no_gradient(model, QKV)
    # P has a row, and one to spare, only if the tokens leave two of the D dimensions free.
    extra = model.tokens + 2 - model.patch_embed.num_patches
    return too_few_equations(model, extra=extra, who="block 0's equations")


def sees_a_norm(model: MJPVisionTransformer) -> Refusal | None:
    """Why block 0's input is not W x_i + beta + e_i, or None."""
    if not model.variant.pre_norm:
        return None
    return Refusal(
        "block", "block 0 does not see W x + e itself: the model normalises it first (ln_pre)"
    )


def token_equations(
    view: AttackerView, update: ClientUpdate, index: int, batch: int = 1
) -> TokenEquations:
    """(*) for the step at `index` of `batch` pictures, from its upload and the weights that the
    client used; pictures share the tokens that are not of patches."""
    state = weights(view, update, WEIGHTS)
    state = {name: value.double() for name, value in state.items()}
    patches = view.model.patch_embed.num_patches
    tokens = view.model.tokens + (batch - 1) * patches
    sent = gradient(view, update, QKV)[index]
    values, vectors = torch.linalg.svd(sent, full_matrices=sent.shape[0] < sent.shape[1])[1:]
    rest = vectors[tokens:]
    width = rest.shape[1]
    centring = torch.eye(width).to(rest) - 1 / width
    scale = state["blocks.0.norm1.weight"]
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
        rest @ state["blocks.0.norm1.bias"],
        state[PATCH].flatten(1),
        added + state[TABLE][0, 1:],
        added + state[UNKNOWN][0] if UNKNOWN in state else None,
        noise / math.sqrt(width),
        noise,
    )


def refine(span: UploadSpan, equations: TokenEquations) -> UploadSpan:
    """The span with fewer open directions by (*), or as it is where (*) does not hold for it.

    `span.hidden` says which patches have E_unk added in place of their own e_i.
    """
    if not len(span.basis):
        return span
    added = equations.own
    if equations.unknown is not None:
        added = torch.where(span.hidden.unsqueeze(1), equations.unknown, added)
    matrix = equations.residual_matrix(span.basis)
    right = equations.right_side(span.complement, added)
    if not _trusted(matrix, right[:, ~span.hidden], equations):
        return span
    solved, still_open = _solve(matrix, right, equations.error)
    return _moved(span, solved, still_open)


def from_tokens_alone(rows: Tensor, equations: TokenEquations, edge: float = 0.0) -> UploadSpan:
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
        visible_misfit, masked_misfit = (
            _misfit(matrix, equations.right_side(zeros, added), equations.error)
            for added in (equations.own, equations.unknown)
        )
        hidden = masked_misfit < FITS * visible_misfit
    return refine(UploadSpan(basis, zeros, hidden), equations)


def _trusted(matrix: Tensor, right: Tensor, equations: TokenEquations) -> bool:
    """Whether (*) holds for the visible patches, whose right sides are `right` (D - T, n).

    P is orthogonal to every token only if each token shows in the gradient (or equals another). In
    a model of one block d_1 ... d_T are dependent, and rows of P are noise. Where there are more
    equations than unknowns, this shows in how much of the right sides is left unexplained.
    """
    u, values = torch.linalg.svd(matrix, full_matrices=False)[:2]
    reach = u[:, values > MARGIN * equations.error * values[0]]
    if reach.shape[1] == len(matrix) or not right.shape[1]:
        return equations.noise < WEAKEST
    rest = (right - reach @ (reach.mT @ right)).norm(dim=0)
    return bool((rest / right.norm(dim=0).clamp_min(TINY)).median() < TRUSTED)


def _misfit(matrix: Tensor, right: Tensor, error: float) -> Tensor:
    """(N,) norm of the part of each right side that the matrix cannot reach, at least the noise."""
    u, values = torch.linalg.svd(matrix, full_matrices=False)[:2]
    reach = u[:, values > MARGIN * error * values[0]]
    rest = right - reach @ (reach.mT @ right)
    return rest.norm(dim=0).clamp_min(MARGIN * error * float(right.norm(dim=0).mean()))


def _solve(matrix: Tensor, right: Tensor, error: float) -> tuple[Tensor, Tensor]:
    """Minimum-norm (a, s) (N, q + 1), and as rows the directions that stay open or are noise."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=True)
    rank = int((values > MARGIN * error * values[0]).sum())
    inverse = vh[:rank].mT / values[:rank]
    return (inverse @ (u[:, :rank].mT @ right)).mT, vh[rank:]


def _moved(span: UploadSpan, solved: Tensor, still_open: Tensor) -> UploadSpan:
    """The span after a is solved up to `still_open`; s, the last unknown, is dropped."""
    directions = still_open[:, :-1]
    decomposed = torch.linalg.svd(directions, full_matrices=False)
    basis = decomposed.Vh[decomposed.S > 1e-9] @ span.basis
    complement = span.complement + solved[:, :-1] @ span.basis
    return replace(span, basis=basis, complement=complement - (complement @ basis.mT) @ basis)
