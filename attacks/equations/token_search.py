r"""Looks for the tokens of a batch, position by position: a patch and what attention adds to it.

In block 0 a token's path through the two-layer network needs nothing of the other tokens but their
sum in attention, o. With the patch x = C_i + a V (`equations.batches`) and o in the row space of
the gradient of the layer after it, attn.proj,

    r = z(x) + W_o o + b_o,    u = norm2(r),    f = act(W_1 u + b_1),

u lies in the row space of the gradient of fc1 and f in that of fc2 (`equations.layers`). These
are N (B - 1) + T unknowns under (D - T) + (4 D - T) equations, for T = B (N + 1) tokens: only the
B tokens that stood at this position solve them, whatever stood elsewhere, so that no picture that
is put together from several ones is a local minimum. Levenberg-Marquardt from random starts, many
at once.

Which tokens of a batch are of one picture: attention adds up the tokens of one picture alone.

For a token with the query q and the sum o of one head, and the keys and values of the tokens y that
stood beside it (the class token among them, which every picture has),

    sum_y exp(q . k_y / sqrt(d)) (v_y - o) = 0.

With all tokens that were found in place of y, each with an unknown weight, this is a linear system,
D equations for at most N B weights that are 1 for the picture's own tokens and 0 for others.

Finds the pictures of a batch from their tokens.

Rounds of searches find tokens (`TokenSearch`), links say which are of one picture
(`linked`). A picture's tokens that are missing stand in the attention of those that
were found: their patches X are moved, from what the field prior says of them, until

    attention(X)_i = o_i    at the positions i that were found,

D equations a position. From there each one's own search ends at it. A picture counts once all of
its layers' inputs lie in their spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from attacks.budget import spent
from attacks.equations.batches import Superposition
from attacks.equations.completion import FieldEnergy, complete
from attacks.equations.layers import DOUBTED, MOST, LayerSpans, doubt_of, through_blocks
from attacks.equations.span import Knowledge
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images, to_patches
from mjp_privacy.models.vit import Block, input_of

PROJ, FC1, FC2 = "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"
STEPS = 40
POLISH = 10  # steps in float64
COARSE = 1e-9  # share outside that searches in float32 can tell from zero
LOOKS = 4  # steps between looks at which searches are worth going on with
STALLED = 0.88  # what a search must have left of its value after so many steps to stop
DAMPING = (1e-2, 0.2, 4.0)  # its first value, and its factors after a better and a worse step
ENTRIES = 2**24  # of the derivatives of the searches that go together
AGREES = 1e-5  # relative error up to which block 0 computes what the equations say
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
            out, scaled = self.block.attn.proj, layer_scales(self.block)[0]
            self.offset = self.embedded(self.known) + scaled(out.bias)
            self.moves = torch.cat((self.units @ embedding.mT, scaled(self.sums @ out.weight.mT)))
            centre = self.coordinates(guess.mean)
        size = centre[:, len(self.units) :].square().mean().sqrt()
        self.scale = torch.cat((torch.ones(len(self.units)).to(size), size.expand(len(self.sums))))
        self.embedding = embedding

    @staticmethod
    def lacking(spans: LayerSpans) -> bool:
        """Whether the equations are not there: a layer does not show all tokens, or block 0
        computes something else. Where attention's sums are not known to lie in a span they may
        make up for any patch, as of random weights whose attention is all but even."""
        shown = spans.bases.keys() >= {PROJ, FC2}
        return not shown or not holds_for(spans.precise().model)

    def embedded(self, patches: Tensor) -> Tensor:
        """z (N, D), block 0's input at the positions of a picture (N, p)."""
        return self._of_patches(self.tokens(patches))

    def tokens(self, patches: Tensor) -> Tensor:
        """All of block 0's input for a picture (N, p): also the tokens that are not of patches."""
        return self._given(self.block, patches)

    def attended(self, patches: Tensor) -> Tensor:
        """What attention adds up to at the positions of a picture (N, p), (N, D)."""
        return self._of_patches(self._given(self.block.attn.proj, patches))

    def _given(self, layer: nn.Module, patches: Tensor) -> Tensor:
        picture = to_images(patches, self.model.patch_size, 3).unsqueeze(0)
        return input_of(self.model, layer, picture)[0]

    def _of_patches(self, tokens: Tensor) -> Tensor:
        return tokens[self.model.prefix : self.model.prefix + len(self.known)]

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
            allowed = equations.allowed(self.offset[list(places[some])].float(), solved)
            passed = shares <= allowed.clamp(enough, max(enough, MOST))
            for place, one, passes in zip(places[some], solved, passed.tolist(), strict=True):
                if passes:
                    found.append(self.token(place, one))
            if spent():
                break
        return found


def layer_scales(block: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    """What block 0 multiplies its attention's and its two-layer network's outputs by: nothing in a
    plain ViT, a vector each where there is layer scale."""
    found = [getattr(block, name, None) for name in ("ls1", "ls2")]
    gammas = [getattr(scale, "gamma", None) for scale in found]
    if gammas == [None, None]:
        gammas = [getattr(block, name, None) for name in ("gamma_1", "gamma_2")]
    return [(lambda x: x) if gamma is None else partial(torch.mul, gamma) for gamma in gammas]


def holds_for(model: MJPVisionTransformer) -> bool:
    """Whether block 0 computes what the equations of tokens and of attention say, on a random
    picture: another norm, gate, position or scale in it shows as another output."""
    block: Any = model.blocks[0]
    side = model.grid * model.patch_size
    parts = ("norm1", "attn", "norm2", "mlp")
    if not all(hasattr(block, part) for part in parts) or not isinstance(block.norm2, nn.LayerNorm):
        return False
    attn, mlp, scaled = block.attn, block.mlp, layer_scales(block)
    if not all(hasattr(attn, part) for part in ("qkv", "proj", "num_heads")):
        return False
    if not all(hasattr(mlp, part) for part in ("fc1", "act", "fc2")):
        return False
    if mlp.fc1.out_features != mlp.fc2.in_features:  # gated
        return False
    generator = torch_generator("a picture for block 0's equations")
    x = torch.randn(1, 3, side, side, generator=generator).to(model.like)
    patches = to_patches(x[0], model.patch_size)
    with torch.no_grad():
        z, empty = (input_of(model, block, seen)[0] for seen in (x, 0 * x))
        expected = empty.clone()
        here = slice(model.prefix, model.prefix + len(patches))
        expected[here] += patches @ model.patch_embed.proj.weight.flatten(1).mT
        split = attn.qkv(block.norm1(z)).view(len(z), 3, attn.num_heads, -1)
        q, k, v = split.permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        attended = attended.transpose(0, 1).flatten(1)
        r = z + scaled[0](attn.proj(attended))
        after = r + scaled[1](mlp.fc2(mlp.act(mlp.fc1(block.norm2(r)))))
        pairs = (z, expected), (through_blocks(model, x, 1)[0], after)
        shapes = all(one.shape == other.shape for one, other in pairs)
        return shapes and all(float((a - b).norm() / b.norm()) < AGREES for a, b in pairs)


@dataclass(frozen=True)
class _Equations:
    """What tokens must satisfy, in one precision."""

    block: Block
    moves: Tensor  # (n, D)
    outside: Tensor  # (D, D) projector off the span of fc1's inputs
    inside: Tensor  # (T, hidden) basis of the span of fc2's
    spans: LayerSpans

    @classmethod
    def of(cls, search: TokenSearch, dtype: torch.dtype) -> _Equations:
        bases, model = search.spans.bases, search.model
        first = bases.get(FC1)
        outside = torch.eye(model.embed_dim).to(search.known)
        outside = outside * 0 if first is None else outside - first.mT @ first
        block = deepcopy(search.block).to(dtype).requires_grad_(False)
        inside = bases[FC2].to(dtype)
        return cls(block, search.moves.to(dtype), outside.to(dtype), inside, search.spans)

    def allowed(self, offset: Tensor, point: Tensor) -> Tensor:
        """The shares (m,) of the inputs at points (m, n) that noise may leave outside."""
        norm, mlp = self.block.norm2, self.block.mlp
        with torch.no_grad():
            u = norm(offset + point @ self.moves)
            inputs = {FC1: u.double(), FC2: mlp.act(mlp.fc1(u)).double()}
        bases, doubts = self.spans.bases, self.spans.doubts
        shares = [
            doubt_of(seen, bases[name], doubts[name]) / seen.square().sum(1)
            for name, seen in inputs.items()
            if name in bases
        ]
        return (DOUBTED * torch.stack(shares).sum(0)).to(point)

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


# which tokens are of one picture ------------------------------------------------------------------


def linked(
    search: TokenSearch, tokens: Sequence[Token], batch: int, least: float
) -> list[list[Token]]:
    """Tokens by picture: at most `batch` lists, no position twice in one.

    least  the mean weight from which a token joins those of a picture, below 1
    """
    if not tokens:
        return []
    weights, misfits = _weights(search, tokens, batch)
    both, pictures, left = (weights + weights.mT) / 2, list[list[Token]](), {*range(len(tokens))}
    while left and len(pictures) < batch:
        members = [min(left, key=lambda one: float(misfits[one]))]
        while True:
            places = {tokens[one].place for one in members}
            others = [one for one in left if tokens[one].place not in places]
            near = both[members][:, others].mean(0)
            if not others or float(near.max()) < least:
                break
            members.append(others[int(near.argmax())])
        left -= set(members)
        pictures.append([tokens[one] for one in members])
    return pictures


def _weights(search: TokenSearch, tokens: Sequence[Token], batch: int) -> tuple[Tensor, Tensor]:
    """Each token's weights for all of them (m, m), and what its equations leave over (m,)."""
    from scipy.optimize import nnls

    patches, places = _with_substitutes(search, tokens, batch)
    q, k, v = _heads(search, patches, places)
    fixed = len(q[0]) - len(places)
    positions = torch.nn.functional.one_hot(torch.tensor(places)).T.to(v)
    weights, misfits = torch.zeros(len(tokens), len(tokens)), torch.zeros(len(tokens))
    for index, token in enumerate(tokens):
        own = q[:, fixed + index]
        powers = torch.einsum("hd,hnd->hn", own, k) * own.shape[-1] ** -0.5
        powers = (powers - powers.amax(1, keepdim=True)).exp()
        sums = token.attended.view(len(q), 1, -1)
        columns = (powers[:, :, None] * (v - sums)).permute(0, 2, 1).flatten(0, 1)
        length = columns[:, fixed:].norm(dim=0).median()
        left = torch.cat((columns[:, fixed:] / length, positions))
        right = torch.cat((-columns[:, :fixed].sum(1) / length, positions.new_ones(len(positions))))
        solved, misfits[index] = nnls(left.cpu().numpy(), right.cpu().numpy(), maxiter=10_000)
        weights[index] = torch.from_numpy(solved)[: len(tokens)]
    return weights, misfits


def _with_substitutes(
    search: TokenSearch, tokens: Sequence[Token], batch: int
) -> tuple[Tensor, list[int]]:
    """Patches and positions of the tokens, and for each position at which some are missing one
    more: what the mean picture leaves for those."""
    patches, places = [token.patch for token in tokens], [token.place for token in tokens]
    for place, mean in enumerate(search.guess.mean):
        here = [token.patch for token in tokens if token.place == place]
        if len(here) < batch:
            patches.append((batch * mean - sum(here)) / (batch - len(here)))
            places.append(place)
    return torch.stack(patches), places


def _heads(search: TokenSearch, patches: Tensor, places: list[int]) -> list[Tensor]:
    """Queries, keys and values (heads, tokens, d): of the tokens that all pictures have, and of
    patches (m, p) at these positions."""
    attention, count, first = search.block.attn, len(search.known), search.model.prefix
    with torch.no_grad():
        whole = search.tokens(search.known)
        own = patches @ search.embedding.mT + search.rest[places]
        tokens = torch.cat((whole[:first], whole[count + first :], own))
        split = attention.qkv(search.block.norm1(tokens))
    return list(split.view(len(tokens), 3, attention.num_heads, -1).permute(1, 2, 0, 3))


# pictures from their tokens -----------------------------------------------------------------------


STARTS = 4  # at each position in each round
SPREADS = (2.0, 4.0, 1.0)  # of the starts of a round, in standard deviations of the prior
FEW = 3  # tokens of a picture that say too little of the others
COMPLETION_STEPS = 120  # of L-BFGS
WEIGHTS = (0.6, 0.8, 0.4, 0.6, 0.7, 0.5)
"""From which links count, in the completions after one round: strict ones leave tokens out, loose
ones join those of several pictures, which then do not stand in the batch."""


@dataclass
class PictureSearch:
    """The tokens of a batch, and its pictures: PictureSearch(generator).found(search, 2, 12, 1e-9)
    gives one picture; tokens of others are kept for the next call, whose batch is smaller."""

    generator: torch.Generator
    tokens: list[Token] = field(default_factory=list)
    waiting: list[tuple[list[Token], Tensor, float]] = field(default_factory=list)
    """Pictures that were found and not yet given: tokens, patches, share."""

    def found(
        self, search: TokenSearch, batch: int, rounds: int, enough: float
    ) -> tuple[Tensor, float] | None:
        """Patches (N, p) of one picture and what share of its inputs lies outside; None where so
        many rounds find none.

        All pictures that the upload shows are looked for before the first is given: taking one out
        of an upload adds its rounding to what is left.
        """
        if not self.waiting:
            self._look(search, batch, rounds, enough)
        if not self.waiting:
            return None
        own, patches, share = self.waiting.pop(0)
        self.tokens = [token for token in self.tokens if token not in own]
        return patches, share

    def _look(self, search: TokenSearch, batch: int, rounds: int, enough: float) -> None:
        """Rounds of searches and completions."""
        centre = search.coordinates(search.guess.mean)
        for number in range(rounds):
            self._searched(search, batch, number, centre, enough)
            for weight in WEIGHTS:
                pictures = linked(search, self.tokens, batch, weight)
                given = [token for own, _, _ in self.waiting for token in own]
                pictures = [own for own in pictures if not any(one in given for one in own)]
                for own in pictures:
                    self._looked_at(search, own, enough)
                if len(self.waiting) == batch or spent():
                    return
                known = len(self.tokens)
                self._completed(search, pictures, batch, enough)
                if len(self.tokens) == known and weight < WEIGHTS[0]:
                    break

    def _looked_at(self, search: TokenSearch, own: list[Token], enough: float) -> None:
        """Keep the picture of N tokens where it stands in the batch."""
        if len(own) < len(search.known):
            return
        patches = torch.stack([one.patch for one in sorted(own, key=lambda one: one.place)])
        share = share_of(search, patches)
        side, channels = search.model.patch_size, len(search.energy.mean)
        seen = to_images(patches, side, channels).unsqueeze(0)
        if search.precise.passes(seen, share, enough):
            self.waiting.append((own, patches, share))

    def _searched(
        self, search: TokenSearch, batch: int, number: int, centre: Tensor, enough: float
    ) -> None:
        """A round of searches from random starts, about the mean picture or, every other round,
        what it leaves for the tokens that are missing."""
        count, places, starts = len(centre), list[int](), list[Tensor]()
        for place in range(count):
            here = [token.patch for token in self.tokens if token.place == place]
            if len(here) == batch:
                continue
            middle = centre[place].clone()
            if here and number % 2:
                rest = (batch * search.guess.mean[place] - sum(here)) / (batch - len(here))
                middle[: len(search.units)] = (rest - search.known[place]) @ search.back
            places += [place] * STARTS
            starts += [middle] * STARTS
        if starts:
            at = torch.stack(starts)
            away = torch.randn(at.shape, generator=self.generator).to(at) * search.scale
            found = search.found(at + SPREADS[number % 3] * away, places, enough)
            self._kept(found, search, batch)

    def _kept(self, found: Sequence[Token], search: TokenSearch, batch: int) -> None:
        """Keep the tokens that are new."""
        new = list[Token]()
        for token in found:
            here = sum(other.place == token.place for other in (*self.tokens, *new))
            if here < batch and not token.is_one_of((*self.tokens, *new)):
                new.append(token)
        self.tokens += search.precisely(new)

    def _completed(
        self, search: TokenSearch, pictures: list[list[Token]], batch: int, enough: float
    ) -> None:
        """Searches from the completions of pictures."""
        places, starts = list[int](), list[Tensor]()
        for tokens in pictures:
            missing = sorted({*range(len(search.known))} - {token.place for token in tokens})
            if not missing or len(tokens) < FEW:
                continue
            starts.append(search.coordinates(completed(search, tokens))[missing])
            places += missing
        if places:
            self._kept(search.found(torch.cat(starts), places, enough), search, batch)


def share_of(search: TokenSearch, patches: Tensor) -> float:
    """What share of the layers' inputs of a picture (N, p) lies outside their spans."""
    with torch.no_grad():
        seen = to_images(patches, search.model.patch_size, len(search.energy.mean)).unsqueeze(0)
        return float(search.precise.off(seen))


def completed(search: TokenSearch, tokens: Sequence[Token]) -> Tensor:
    """A picture (N, p) with these tokens, whose other patches fit the attention of these."""
    exact, sums = torch.zeros_like(search.known), search.known.new_zeros(search.rest.shape)
    kept = torch.zeros(len(exact), dtype=torch.bool, device=exact.device)
    for token in tokens:
        exact[token.place], sums[token.place] = token.patch, token.attended
        kept[token.place] = True
    nothing = torch.zeros_like(kept)
    knowledge = Knowledge(search.known, search.guess.basis, nothing)
    likely = complete(knowledge, search.energy, kept, exact)
    known = search.known[~kept]
    moves = ((likely[~kept] - known) @ search.back).requires_grad_()
    size = sums[kept].square().mean()
    optimizer = torch.optim.LBFGS(
        [moves],
        max_iter=COMPLETION_STEPS,
        max_eval=COMPLETION_STEPS + COMPLETION_STEPS // 4,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )

    def picture(moves: Tensor) -> Tensor:
        patches = exact.clone()
        patches[~kept] = known + moves @ search.units
        return patches

    def closure() -> Tensor:
        optimizer.zero_grad()
        off = (search.attended(picture(moves)) - sums)[kept].square().mean() / size
        (1e3 * off).backward()
        return 1e3 * off.detach()

    optimizer.step(closure)
    return picture(moves.detach())
