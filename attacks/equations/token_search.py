r"""Looks for the tokens of a batch, position by position: a patch and what attention adds to it.

In block 0 a token's path through the two-layer network needs nothing of the other tokens but their
sum in attention, o. With the patch x = C_i + a V (`equations.batch_span`) and o in the row space of
the gradient of the layer after it, attn.proj,

    r = z(x) + W_o o + b_o,    u = norm2(r),    f = act(W_1 u + b_1),

u lies in the row space of the gradient of fc1 and f in that of fc2 (`equations.layer_spans`). These
are N (B - 1) + T unknowns under (D - T) + (4 D - T) equations, for T = B (N + 1) tokens: only the
B tokens that stood at this position solve them, whatever stood elsewhere, so that no picture that
is put together from several ones is a local minimum. Levenberg-Marquardt from random starts, many
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from attacks.budget import spent
from attacks.equations.completion import FieldEnergy
from attacks.equations.layer_spans import LayerSpans, inputs_of
from attacks.equations.superposition import Superposition
from mjp_privacy.models.jigsaw import to_images
from mjp_privacy.models.vit import Block

PROJ, FC1, FC2 = "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"
STEPS = 40
POLISH = 10  # steps in float64
COARSE = 1e-9  # share outside that searches in float32 can tell from zero
LOOKS = 4  # steps between looks at which searches are worth going on with
STALLED = 0.88  # what a search must have left of its value after so many steps to stop
DAMPING = (1e-2, 0.2, 4.0)  # its first value, and its factors after a better and a worse step
ENTRIES = 2**24  # of the derivatives of the searches that go together
SAME = 0.02  # root mean square by which normalised patches differ that are two


@dataclass(frozen=True, eq=False)
class Token:
    """A token of some picture of the batch: its position, its normalised patch (p,), and what its
    attention adds up to (D,); float64."""

    place: int
    patch: Tensor
    attended: Tensor

    def is_one_of(self, others: Sequence[Token]) -> bool:
        """Whether the patch is among those of others at its position."""
        same = (other for other in others if other.place == self.place)
        return any(float((self.patch - one.patch).square().mean().sqrt()) < SAME for one in same)


class TokenSearch:
    """The equations of tokens: TokenSearch(spans, guess, energy).found(starts, places, 1e-9)."""

    def __init__(self, spans: LayerSpans, guess: Superposition, energy: FieldEnergy) -> None:
        self.spans, self.guess, self.energy = spans, guess, energy
        basis = guess.basis
        root = torch.linalg.cholesky(basis @ energy.patch_precision @ basis.mT)
        self.units = torch.linalg.solve_triangular(root, basis, upper=False)
        self.back = basis.mT @ root
        self.known = guess.mean - (guess.mean @ basis.mT) @ basis
        self.precise = spans.precise()
        self.model = self.precise.model
        self.block = cast(Block, self.model.blocks[0])
        with torch.no_grad():
            embedding = self.model.patch_embed.proj.weight.flatten(1)
            self.rest = self.embedded(self.known) - self.known @ embedding.mT
            self.sums = spans.bases.get(PROJ, torch.eye(self.model.embed_dim).to(self.known))
            out = self.block.attn.proj
            self.offset = self.embedded(self.known) + out.bias
            self.moves = torch.cat((self.units @ embedding.mT, self.sums @ out.weight.mT))
            centre = self.coordinates(guess.mean)
        size = centre[:, len(self.units) :].square().mean().sqrt()
        self.scale = torch.cat((torch.ones(len(self.units)).to(size), size.expand(len(self.sums))))
        self.embedding = embedding

    @staticmethod
    def lacking(spans: LayerSpans) -> bool:
        """Whether the equations are not there: a layer does not show all tokens, or the model has a
        norm between its patch embedding and block 0."""
        return FC2 not in spans.bases or not isinstance(spans.model.norm_pre, nn.Identity)

    def embedded(self, patches: Tensor) -> Tensor:
        """z (N, D), block 0's input at the positions of a picture (N, p)."""
        return self.tokens(patches)[1 : len(patches) + 1]

    def tokens(self, patches: Tensor) -> Tensor:
        """All of block 0's input for a picture (N, p): also the class token."""
        side = self.model.patch_size
        tokens: Tensor = self.model.embed(to_images(patches, side, 3).unsqueeze(0))[0]
        return tokens

    def attended(self, patches: Tensor) -> Tensor:
        """What attention adds up to at the positions of a picture (N, p), (N, D)."""
        with inputs_of(self.model, [PROJ]) as seen:
            self.block.attn(self.block.norm1(self.tokens(patches).unsqueeze(0)))
        return seen[PROJ][0, 1 : len(patches) + 1]

    def coordinates(self, patches: Tensor) -> Tensor:
        """Where a search starts at the positions of a picture (N, p), (N, n)."""
        with torch.no_grad():
            sums = self.attended(patches) @ self.sums.mT
        return torch.cat(((patches - self.known) @ self.back, sums), 1)

    def token(self, place: int, coordinates: Tensor) -> Token:
        moved, sums = coordinates.double().split((len(self.units), len(self.sums)))
        return Token(place, self.known[place] + moved @ self.units, sums @ self.sums)

    def precisely(self, tokens: Sequence[Token]) -> list[Token]:
        """Tokens that were found, made exact in float64."""
        if not tokens:
            return []
        places = [token.place for token in tokens]
        patches = torch.stack([token.patch for token in tokens])
        sums = torch.stack([token.attended for token in tokens]) @ self.sums.mT
        start = torch.cat(((patches - self.known[places]) @ self.back, sums), 1)
        equations = _Equations.of(self, torch.double)
        solved, _ = equations.solved(self.offset[places], start, 0.0, POLISH)
        return [self.token(*one) for one in zip(places, solved, strict=True)]

    def found(self, starts: Tensor, places: Sequence[int], enough: float) -> list[Token]:
        """The tokens that searches from these starts (m, n) at these positions lead to."""
        equations, enough = _Equations.of(self, torch.float32), max(enough, COARSE)
        at_once = max(1, ENTRIES // (starts.shape[1] * self.block.mlp.fc1.out_features))
        found = list[Token]()
        for first in range(0, len(starts), at_once):
            some = slice(first, first + at_once)
            solved, shares = equations.solved(
                self.offset[list(places[some])].float(), starts[some].float(), enough, STEPS
            )
            for place, one, share in zip(places[some], solved, shares.tolist(), strict=True):
                if share <= enough:
                    found.append(self.token(place, one))
            if spent():
                break
        return found


@dataclass(frozen=True)
class _Equations:
    """What tokens must satisfy, in one precision."""

    block: Block
    moves: Tensor  # (n, D)
    outside: Tensor  # (D, D) projector off the span of fc1's inputs
    inside: Tensor  # (T, hidden) basis of the span of fc2's

    @classmethod
    def of(cls, search: TokenSearch, dtype: torch.dtype) -> _Equations:
        bases, model = search.spans.bases, search.model
        first = bases.get(FC1)
        outside = torch.eye(model.embed_dim).to(search.known)
        outside = outside * 0 if first is None else outside - first.mT @ first
        block = deepcopy(search.block).to(dtype).requires_grad_(False)
        inside = bases[FC2].to(dtype)
        return cls(block, search.moves.to(dtype), outside.to(dtype), inside)

    def solved(
        self, offset: Tensor, start: Tensor, enough: float, steps: int
    ) -> tuple[Tensor, Tensor]:
        """Local minima (m, n) near starts (m, n), whose token has this offset (m, D), and the
        shares (m,) of their inputs that lie outside."""
        solution, shares = start.clone(), start.new_full((len(start),), torch.inf)
        damping = start.new_full((len(start),), DAMPING[0])
        active = torch.arange(len(start), device=start.device)
        here, point = offset, start
        state, before = self._linearised(here, point), None
        for step in range(steps):
            gram, slope, value = state
            diagonal = gram.diagonal(dim1=1, dim2=2).clamp_min(1e-12)
            damped = gram + torch.diag_embed(damping[:, None] * diagonal)
            trial = point - torch.linalg.solve_ex(damped, slope).result  # no number: no better
            moved = self._linearised(here, trial)
            better = moved[2] < value
            point = torch.where(better[:, None], trial, point)
            state = tuple(
                torch.where(better.view(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(moved, state, strict=True)
            )
            damping = (damping * torch.where(better, *DAMPING[1:])).clamp(1e-7, 1e6)
            if (step + 1) % LOOKS and step + 1 < steps:
                continue
            solution[active], shares[active] = point, state[2]
            going = state[2] > enough
            if before is not None:
                going &= state[2] < STALLED * before
            active, damping, here, point = (x[going] for x in (active, damping, here, point))
            state = tuple(x[going] for x in state)
            before = state[2]
            if not len(active) or spent():
                break
        return solution, shares

    def _linearised(self, offset: Tensor, point: Tensor) -> tuple[Tensor, ...]:
        """J^T J (m, n, n), J^T r (m, n) and |r|^2 (m,) of the residual r at points (m, n)."""
        norm, mlp = self.block.norm2, self.block.mlp
        r = offset + point @ self.moves
        centred = r - r.mean(1, keepdim=True)
        spread = (centred.square().mean(1, keepdim=True) + norm.eps).sqrt()
        h = centred / spread
        u = h * norm.weight + norm.bias
        with torch.enable_grad():
            before = mlp.fc1(u).detach().requires_grad_()
            f = mlp.act(before)
            (bend,) = torch.autograd.grad(f.sum(), before)
        f = f.detach()
        off_u, off_f = u @ self.outside, f - (f @ self.inside.mT) @ self.inside
        of_u, of_f = u.square().sum(1), f.square().sum(1)
        level = self.moves - self.moves.mean(1, keepdim=True)
        du = level - (h @ level.mT / h.shape[1])[:, :, None] * h[:, None]
        du = du * (norm.weight / spread)[:, None]
        df = (du @ mlp.fc1.weight.mT) * bend[:, None]
        seen, off_du = df @ self.inside.mT, du @ self.outside
        gram = off_du @ off_du.mT / of_u[:, None, None]
        gram = gram + (df @ df.mT - seen @ seen.mT) / of_f[:, None, None]
        slope = (off_du @ off_u[:, :, None])[:, :, 0] / of_u[:, None]
        slope = slope + (df @ off_f[:, :, None])[:, :, 0] / of_f[:, None]
        value = off_u.square().sum(1) / of_u + off_f.square().sum(1) / of_f
        return gram, slope, value
