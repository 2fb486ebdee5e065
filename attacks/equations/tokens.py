r"""What block 0 says of the patches when dL/dE_pos is not uploaded, or beside it.

Attention sees n_i = gamma * (z_i - mean(z_i)) / s_i + b, the LayerNorm of z_i = W x_i + beta + e_i,
and the gradient of its first layer is a sum over tokens,

    blocks.0.attn.qkv.weight.grad = sum_i d_i n_i^T,

so its row space is the span of the T = N + 1 tokens' n_i. With P the rows of an orthonormal basis
of the rest (T < D), P n_i = 0 for every token, which is linear in x_i and in the scalar s_i:

    P diag(gamma) (I - 11^T / D) (W x_i + beta + e_i) + s_i P b = 0.            (*)

Let x_i = c_i + a_i B be what is known already: the row space of patch_embed.proj.weight.grad
(c = 0) when nothing else is, or `equations.span`'s result. Then (*) is the same small system for
every patch but for its right side, and shrinks the open directions. Masked patches share E_unk, so
the differences of any two of them stay open; plain patches do not share their e_i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.equations.names import PATCH, QKV, TABLE, UNKNOWN
from attacks.equations.span import UploadSpan, noise_edge
from attacks.equations.system import error_of, gradient, weights
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Refusal

WEIGHTS = (
    *(TABLE, UNKNOWN, "index_embed", PATCH, "patch_embed.proj.bias"),
    *("blocks.0.norm1.weight", "blocks.0.norm1.bias"),
)
MARGIN = 3.0  # by which a singular value must exceed the gradient's rounding to count
TRUSTED = 0.05  # share of the right sides that (*) may leave unexplained
WEAKEST = 0.05  # noise over the weakest token's singular value, where (*) explains anything
TINY = 1e-300
FITS = 0.1  # a residual of (*) below this share of the other hypothesis' decides for it


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
        """The unknowns' matrix (D - T, q + 1): a of `basis` (q, p), then s."""
        return torch.cat((self.system @ (self.weight @ basis.mT), self.shift.unsqueeze(1)), 1)

    def right_side(self, known: Tensor, added: Tensor) -> Tensor:
        """(D - T, N)."""
        return -self.system @ (known @ self.weight.mT + added).mT


def lacks_tokens(view: AttackerView, update: ClientUpdate) -> Refusal | None:
    """Why an upload has no such equations, or None."""
    model = view.model
    if model.first_block != "intact" or not isinstance(
        getattr(model.blocks[0], "norm1", None), torch.nn.LayerNorm
    ):
        return Refusal("block", "block 0 has no LayerNorm before its attention")
    if model.pos_embed is None:
        return Refusal(
            "positions", "the model has no position embeddings, so nothing tells its patches apart"
        )
    if update.batch != 1:
        return Refusal(
            "batch", f"the tokens of {update.batch} pictures share one span; batch 1 is needed"
        )
    if QKV not in update.grads:
        return Refusal("missing_gradient", f"the upload holds no gradient of {QKV}")
    tokens = model.patch_embed.num_patches + 1
    if tokens + 1 >= model.embed_dim:
        return Refusal(
            "underdetermined",
            f"underdetermined: {tokens} tokens span all {model.embed_dim} dimensions of block 0's "
            "input (N + 2 < D is needed)",
        )
    return None


def token_equations(view: AttackerView, update: ClientUpdate, index: int) -> TokenEquations:
    """(*) of the picture at `index`, from its upload and the weights it was made with."""
    state = {n: value.double() for n, value in weights(view, update).items() if n in WEIGHTS}
    tokens = view.model.patch_embed.num_patches + 1
    sent = gradient(view, update, QKV)[index]
    values, vectors = torch.linalg.svd(sent, full_matrices=sent.shape[0] < sent.shape[1])[1:]
    rest = vectors[tokens:]
    width = rest.shape[1]
    centring = torch.eye(width).to(rest) - 1 / width
    scale = state["blocks.0.norm1.weight"]
    added = state["patch_embed.proj.bias"].expand(tokens - 1, -1)
    if "index_embed" in state:
        added = added + state["index_embed"][0, 1:]
    # The first singular value that should be zero is the gradient's own noise; the weakest token's
    # direction is off by the ratio, which a generic direction of D feels by 1 / sqrt(D) of it.
    # A defence's known noise reaches singular values by itself, whatever this one shows.
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
    """The same knowledge with (*) used: fewer open directions; `hidden` says who has E_unk."""
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
    """Knowledge without dL/dE_pos: x_i = a_i B, B the row space of G = `rows` (D, p).

    Where known noise reaches a singular value of that span by itself, `edge`, it is none: every
    direction stays open.

    Positions whose own e_i leaves a residual that E_unk does not are the masked ones; where (*)
    has too few equations to tell, none is.
    """
    patches = len(equations.own)
    _, values, basis = torch.linalg.svd(rows, full_matrices=False)
    basis = basis[: min(patches, *rows.shape)]
    if values[len(basis) - 1] < edge:
        basis = torch.eye(rows.shape[1]).to(rows)
    nothing = torch.zeros(patches, rows.shape[1]).to(rows)
    matrix = equations.residual_matrix(basis)
    hidden = torch.zeros(patches, dtype=torch.bool, device=rows.device)
    if equations.unknown is not None:
        own, unknown = (
            _misfit(matrix, equations.right_side(nothing, added), equations.error)
            for added in (equations.own, equations.unknown)
        )
        hidden = unknown < FITS * own
    return refine(UploadSpan(basis, nothing, hidden), equations)


def _trusted(matrix: Tensor, right: Tensor, equations: TokenEquations) -> bool:
    """Whether (*) holds for the visible patches, right sides (D - T, n).

    The rows beyond the T-th are orthogonal to every token only if each of them shows in the
    gradient (or equals another): with one block d_1 ... d_T are dependent, and the rows are noise.
    Where there are more equations than they can explain away, that is seen in what they leave.
    """
    u, values = torch.linalg.svd(matrix, full_matrices=False)[:2]
    reach = u[:, values > MARGIN * equations.error * values[0]]
    if reach.shape[1] == len(matrix) or not right.shape[1]:
        return equations.noise < WEAKEST
    rest = (right - reach @ (reach.mT @ right)).norm(dim=0)
    return bool((rest / right.norm(dim=0).clamp_min(TINY)).median() < TRUSTED)


def _misfit(matrix: Tensor, right: Tensor, error: float) -> Tensor:
    """(N,) norm of the part of each right side that the matrix cannot reach, not below noise."""
    u, values = torch.linalg.svd(matrix, full_matrices=False)[:2]
    reach = u[:, values > MARGIN * error * values[0]]
    rest = right - reach @ (reach.mT @ right)
    return rest.norm(dim=0).clamp_min(MARGIN * error * float(right.norm(dim=0).mean()))


def _solve(matrix: Tensor, right: Tensor, error: float) -> tuple[Tensor, Tensor]:
    """Minimum-norm (a, s) (N, q + 1) up to directions that noise hides, and those, as rows."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=True)
    rank = int((values > MARGIN * error * values[0]).sum())
    inverse = vh[:rank].mT / values[:rank]
    return (inverse @ (u[:, :rank].mT @ right)).mT, vh[rank:]


def _moved(span: UploadSpan, solved: Tensor, still_open: Tensor) -> UploadSpan:
    """x = c + a B with a known up to `still_open`; s, the last unknown, is not kept."""
    directions = still_open[:, :-1]
    kept = torch.linalg.svd(directions, full_matrices=False)
    basis = kept.Vh[kept.S > 1e-9] @ span.basis
    point = span.complement + solved[:, :-1] @ span.basis
    return replace(span, basis=basis, complement=point - (point @ basis.mT) @ basis)
