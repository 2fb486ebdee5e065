r"""Finds every token of an upload in block 0's gradients, and takes each one out of them.

For a token r that attention hands on, u = norm2(r) and f = act(W_1 u + b_1), the gradients are

    dL/dW_1 = sum_t d_t u_t^T,   dL/dW_2 = sum_t g_t f_t^T,   d_t = act'(W_1 u_t + b_1) * W_2^T g_t

with g_t = dL/d(output). A bias' gradient is that of one more input, which is 1.

**One token.** u lies in the row space of the first, T - 1 unknowns for T tokens, and f in that of
the second: 4 D - T equations, which hold at the T tokens and at nothing else. Levenberg-Marquardt
from random points ends at one of them nearly every time where weights are trained.

**Taken out.** d = act' * W_2^T g lies in the column space of dL/dW_1, which is 4 D - T linear
equations for g in that of dL/dW_2: g is known up to a factor, the one for which dL/dW_2 - g f^T has
one rank less (Wedderburn). The inputs of all other tokens lie in the rows that this leaves.

**What attention added.** With LayerNorm's derivative, dL/dr_t = g_t + s_t h_t is known up to
s_t = 1 / sqrt(var(r_t) + eps). It lies in the column space of attn.proj's gradient,

    dL/dW_o = sum_t (dL/dr_t) o_t^T,

of T < D dimensions, which gives s_t; then this is a linear system for the sums o_t. So block 0's
input z_t = r_t - W_o o_t - b_o is known, but for its mean: r_t is (u_t - beta) / (gamma s_t) and a
multiple of ones. An RMSNorm does not take out the mean, which is not used.

A block that normalises sums, u = norm2(z + attention) and norm3(u + branch), has dL/dr_t = s_t h_t
with the g_t of the sum in h_t: s_t is open, s_t o_t is what the linear system gives, and block 0's
input is known up to s_t. Of branches beside each other, both given z, u = norm2(z), and dL/dW_o =
sum_t g_t o_t^T gives o_t at once.

Layer scale multiplies g_t in both branches. Between the two layers any function may stand, a gate
among them; two first layers that gate each other are one layer of both outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from attacks.budget import spent
from attacks.equations.block import FC2, PROJ, TwoLayers, first_layers, layer_scales
from attacks.equations.patch_system import least_squares
from mjp_privacy.interfaces import Grads
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.vit import copied

SHOWN = 5.0  # times the first singular value that should be 0 from which a direction is a token's
NEAR, FAR = 8, 32
"""Searches of a round, and of one after fewer than half of a round's have ended at tokens."""
FARTHEST = 0.7
"""Decimal logarithm of how many times the usual length of an input half of a far round's searches
start away: from afar, where the activation bends more, others end at tokens."""
ALIKE, SPREAD = 8, 3.0
"""Tokens that were found from which the other half start at mixtures of them, and how many times as
far from their mean as they are: the tokens of an upload are alike, masked ones above all."""
POLISH = 6  # steps of a search that is made exact in float64
REPEATED = 8  # times that a step of the latter is repeated with the same derivatives, at most
PATIENCE = 10  # rounds that find no new token before the search ends
COARSE, ROUGH = 1e-6, 1e-2
"""The share outside the span of what is left at which a search has ended near a token, and the same
where few do: that span is as exact as the tokens that were taken out, weak ones' hardly so."""
FINE, DOUBTED, MOST = 1e-11, 40.0, 1e-6
"""The share outside the whole span that a token may have that counts as found, how many times what
the gradients' noise is expected to leave there may as well, and the most."""
SAME = 1e-3  # relative distance below which two inputs are of one token
LOOKS, STALLED = 4, 0.7
"""Steps between looks at a search, and what of its value is left since the last where it stops."""
QUICK, PATIENT, IDLE = (40, STALLED), (300, 0.99), 2
"""Steps of a search in float32 with what is left where it stops, and the same after so many rounds
that found no new token: searches in some untrained networks go slowly to their end."""
DAMPING, DAMPING_FINE = 1e-2, 1e-6
LESS, MORE = 0.2, 4.0  # times the damping after a better and a worse step
ENTRIES = 2**25  # of the derivatives of the searches that go together


@dataclass(frozen=True, eq=False)
class PeeledTokens:
    """The tokens of an upload, in no order; float64."""

    directions: Tensor  # (T, D): r_t less its mean, up to its length
    attended: Tensor | None
    """(T, D): o_t; None where the gradients do not show attention's sums. Nearly so where tokens
    are missing, whose share in that gradient is given to the others."""
    lengths: Tensor | None  # (T,): the factors of the directions; None likewise
    complete: bool  # as many as the gradients show
    taken_out: Tensor | None = None
    """(T, D): o_t up to its length, where that is open: then the directions are those of block 0's
    inputs, and `attended` is 0."""
    beside: bool = False
    """Whether attention stands beside what is read: directions are those of block 0's inputs."""
    received: Tensor | None = None
    """(T, D): dL/d(output of attn.proj), up to its length; None where `attended` is."""

    def __len__(self) -> int:
        return len(self.directions)


@dataclass(frozen=True)
class SentGradient:
    """A layer's gradient with its bias' as one more column, and its singular directions that exceed
    the noise."""

    total: Tensor  # (out, width + 1); without a bias (out, width)
    left: Tensor  # (out, k)
    values: Tensor  # (k,)
    rows: Tensor  # (k, width + 1)
    noise: float  # the variance of an entry

    @classmethod
    def of(cls, grads: Grads, layers: Sequence[str], most: int) -> SentGradient:
        """One step's gradient of a layer, or of several of the same input, of at most so many
        tokens."""
        total = torch.cat([grads[f"{layer}.weight"] for layer in layers]).double()
        biases = [grads.get(f"{layer}.bias") for layer in layers]
        if all(bias is not None for bias in biases):
            total = torch.cat((total, torch.cat(biases).double().unsqueeze(1)), 1)  # type: ignore[arg-type]
        u, s, vh = torch.linalg.svd(total, full_matrices=False)
        most = min(most, len(s))
        floor = float(s[most]) if most < len(s) else float(s[0]) * torch.finfo(torch.float32).eps
        shown = int((s[:most] > SHOWN * floor).sum())
        free = max((total.shape[0] - most) * (total.shape[1] - most), 1)
        noise = float(s[most:].square().sum()) / free
        return cls(total, u[:, :shown], s[:shown], vh[:shown], noise)

    def rows_without(self, gradients: Tensor) -> Tensor:
        """The part (k - n, width + 1) of the rows that holds the inputs of all other tokens than
        those with these gradients (n, out) at the layer's output."""
        across = (self.left.mT @ gradients.mT) / self.values[:, None]
        across = across / across.norm(dim=0)
        turn = torch.linalg.qr(across, mode="complete").Q
        return turn[:, across.shape[1] :].mT @ self.rows

    def doubt(self, inputs: Tensor) -> Tensor:
        """What share of inputs (m, width + 1), squared, noise is expected to leave outside."""
        free = self.rows.shape[1] - len(self.rows)
        along = (inputs @ self.rows.mT).square() @ (1 / self.values.square())
        return self.noise * free * along / inputs.square().sum(1)


def tokens_of(
    model: MJPVisionTransformer, grads: Grads, most: int, generator: torch.Generator
) -> PeeledTokens | None:
    """The tokens in one step's gradients (*shape) of at most `most`; None where none is found."""
    branch = TwoLayers.of(model)
    first, second, sums = (
        SentGradient.of(grads, names, most) for names in (first_layers(model), (FC2,), (PROJ,))
    )
    peeling = Peeling(branch, first, second, generator)
    found, upstream = peeling.all_tokens()
    if not len(found):
        return None
    complete = len(found) >= len(second.values)
    weight, bias, centres = branch.scaling
    directions = (found - bias) / weight
    attended = lengths = taken_out = received = None
    if len(sums.values):
        if complete:
            inputs = _augmented(branch.hidden(found), second)
            upstream = least_squares(inputs, second.total.mT)
            upstream = _unscaled(branch.scaled, upstream)
        back = branch.back(found, upstream) @ branch.first.weight
        out: Any = model.get_submodule(PROJ)
        scaled = layer_scales(model.blocks[0])[0]
        if branch.beside:
            received = scaled(upstream)
            attended = least_squares(received, sums.total)[:, : out.in_features]
        elif branch.last is None:  # g and h, scaled, less what the gradient's columns span
            back = _through_norm(back * weight, directions, centres)
            off, moved = (
                one - (one @ sums.left) @ sums.left.mT for one in map(scaled, (upstream, back))
            )
            s = -(off * moved).sum(1) / moved.square().sum(1)
            received, lengths = scaled(upstream + s[:, None] * back), 1 / s
            attended = least_squares(received, sums.total)[:, : out.in_features]
        else:
            back = _through_norm((upstream + back) * weight, directions, centres)
            received = scaled(back)
            taken_out = least_squares(received, sums.total)[:, : out.in_features]
            added = scaled(taken_out @ out.weight.mT)
            directions = directions - (added - added.mean(1, keepdim=True))
            attended = torch.zeros_like(taken_out)
    if not centres:
        directions = directions - directions.mean(1, keepdim=True)
    return PeeledTokens(directions, attended, lengths, complete, taken_out, branch.beside, received)


def _through_norm(back: Tensor, directions: Tensor, centres: bool) -> Tensor:
    """Gradients (T, D) of normalised tokens as gradients of the tokens, up to their lengths."""
    back = back - back.mean(1, keepdim=True) if centres else back
    return back - directions * (back * directions).mean(1, keepdim=True)


def _augmented(inputs: Tensor, sent: SentGradient) -> Tensor:
    """Inputs (m, width) with the 1 that the bias sees, where its gradient was sent."""
    if sent.rows.shape[1] == inputs.shape[1]:
        return inputs
    return torch.cat((inputs, inputs.new_ones(len(inputs), 1)), 1)


def _unscaled(scaled: Callable[[Tensor], Tensor], gradients: Tensor) -> Tensor:
    return gradients / scaled(torch.ones_like(gradients))


class Peeling:
    """Searches for tokens, and the gradients that are left after those that were found."""

    def __init__(
        self,
        branch: TwoLayers,
        first: SentGradient,
        second: SentGradient,
        generator: torch.Generator,
    ) -> None:
        self.branch, self.first, self.second, self.generator = branch, first, second, generator

    def all_tokens(self) -> tuple[Tensor, Tensor]:
        """u and g (n, D) of all tokens that searches find."""
        both = self.first, self.second
        rows = [one.rows for one in both]
        whole = _Equations(self.branch, self.second, *rows)
        found = upstream = whole.start.new_zeros(0, self.branch.first.in_features)
        idle, far = 0, False
        while len(found) < len(self.second.values) and idle < PATIENCE and not spent():
            equations = _Equations(self.branch, self.second, *rows)
            starts, enough = self._starts(equations, found, far), ROUGH if far else COARSE
            ends = equations.found(starts, enough, PATIENT if idle >= IDLE else QUICK)
            far = len(ends) < (FAR if far else NEAR) // 2
            fresh = _distinct(whole.polished(_distinct(ends, found[:0])), found)
            idle = 0 if len(fresh) else idle + 1
            if len(fresh):
                found = torch.cat((found, fresh))
                upstream = torch.cat((upstream, self.upstream(fresh)))
                sent = self.branch.back(found, upstream), self.branch.scaled(upstream)
                rows = [one.rows_without(part) for one, part in zip(both, sent, strict=True)]
        return found, upstream

    def _starts(self, equations: _Equations, found: Tensor, far: bool) -> Tensor:
        """y (m, k) that a round's searches start from."""
        count = len(equations.moves)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=self.generator).to(found)

        usual = (found.shape[1] / max(count, 1)) ** 0.5  # of a normalised input
        if not far:
            return usual * random(NEAR, count)
        scales = usual * torch.logspace(0, FARTHEST, FAR).to(found).unsqueeze(1)
        starts = scales * random(FAR, count)
        if len(found) >= ALIKE:
            mean, weights = found.mean(0), random(FAR // 2, len(found)) / len(found) ** 0.5
            starts[::2] = equations.nearest(mean + SPREAD * weights @ (found - mean))
        return starts

    def upstream(self, found: Tensor) -> Tensor:
        """g (n, D) of tokens u (n, D)."""
        basis, branch = self.second.left.mT, self.branch
        before, pulled = branch.first(found), basis @ branch.second.weight
        inside = (_augmented(branch.between(before), self.second) @ self.second.rows.mT) / (
            self.second.values
        )
        gradients = list[Tensor]()
        for one, along in zip(before, inside, strict=True):
            back = vjp(branch.between, one.expand(len(basis), -1))[1](pulled)[0]
            off = back - (back @ self.first.left) @ self.first.left.mT
            direction = torch.linalg.eigh(off @ off.mT).eigenvectors[:, 0]
            gradients.append(direction @ basis / (along @ direction))
        return _unscaled(branch.scaled, torch.stack(gradients))


def _distinct(vectors: Tensor, known: Tensor) -> Tensor:
    """Those of some vectors (m, D) that are none of the known ones (n, D), each once."""
    kept = list[Tensor]()
    for vector in vectors:
        others = torch.cat((known, *(one.unsqueeze(0) for one in kept)))
        if not len(others) or float((others - vector).norm(dim=1).min()) > SAME * vector.norm():
            kept.append(vector)
    return torch.stack(kept) if kept else vectors[:0]


class _Equations:
    """What one token's u must satisfy: u = start + y moves, and f in its span."""

    sphere: tuple[Tensor, Tensor] | None = None
    """A point (D,) and directions (k, D) of which y makes vectors of length 1."""
    weight = 1.0  # of that equation beside those of f

    def __init__(
        self, branch: TwoLayers, second: SentGradient, inputs: Tensor, inner: Tensor
    ) -> None:
        """inputs, inner  orthonormal rows of the spans of (u, 1) and (f, 1)"""
        self.branch, self.second, self.rows = branch, second, inner
        first, width = branch.first, branch.first.in_features
        rows, last = inputs[:, :width], inputs[:, width:]
        self.start, self.moves = rows.new_zeros(width), rows
        if last.numel() and bool(last.any()):
            turn = torch.linalg.qr(last, mode="complete").Q
            self.start = (last * rows).sum(0) / last.square().sum()
            self.moves = turn[:, 1:].mT @ rows
        else:  # u = 0 solves the equations of layers without biases: a norm's output is long
            weight, bias, _ = branch.scaling
            scale = weight * width**0.5
            self.sphere = (self.start - bias) / scale, self.moves / scale
        self.before = first.weight @ self.start + (0 if first.bias is None else first.bias)
        self.along = self.moves @ first.weight.mT

    def coarse(self) -> _Equations:
        """The same in float32."""
        one = copy(self)
        one.branch = replace(self.branch, between=copied(self.branch.between).float())
        one.rows, one.before, one.along = self.rows.float(), self.before.float(), self.along.float()
        one.sphere = self.sphere and (self.sphere[0].float(), self.sphere[1].float())
        return one

    def nearest(self, u: Tensor) -> Tensor:
        """y (m, k) of the points that are nearest to some u (m, D)."""
        return (u - self.start) @ torch.linalg.pinv(self.moves)

    def found(self, starts: Tensor, enough: float, searches: tuple[int, float]) -> Tensor:
        """u (m, D) that searches (`QUICK`) from points (n, k) end at, where that share outside is
        enough."""
        each = max(starts.shape[1] * self.branch.second.in_features, 1)
        ends, shares, coarse = list[Tensor](), list[Tensor](), self.coarse()
        coarse.weight = float(self._residual(starts[:NEAR])[0].square().sum(1).mean())
        for some in starts.split(max(1, ENTRIES // each)):
            end, share = coarse._solved(some.float(), *searches)
            ends.append(end)
            shares.append(share)
            if spent():
                break
        u = self.start + torch.cat(ends).double() @ self.moves
        return u[torch.cat(shares) <= enough]

    def polished(self, u: Tensor) -> Tensor:
        """Tokens u (m, D) made exact in float64 by Newton's steps, each repeated with the same
        derivatives as long as that helps; those that solve the equations."""
        if not len(u):
            return u
        y = self.nearest(u)
        f, r = self._residual(y)
        value = r.square().sum(1)
        for _ in range(POLISH):
            before, (gram, slopes) = value, self._derivatives(y)
            solver = torch.linalg.lu_factor_ex(self._damped(gram, DAMPING_FINE))[:2]
            for _ in range(REPEATED):
                step = torch.linalg.lu_solve(*solver, _along(slopes, r).unsqueeze(2))[:, :, 0]
                trial_f, trial_r = self._residual(y - step)
                trial = trial_r.square().sum(1)
                better, helps = trial < value, trial < STALLED * value
                y = torch.where(better[:, None], y - step, y)
                f, r = (
                    torch.where(better[:, None], trial_f, f),
                    torch.where(better[:, None], trial_r, r),
                )
                value = torch.where(better, trial, value)
                if not bool(helps.any()):
                    break
            if not bool((value < STALLED * before).any()):
                break
        u, share = self.start + y @ self.moves, value / f.square().sum(1)
        return u[share <= (DOUBTED * self.second.doubt(f)).clamp(FINE, MOST)]

    def _solved(self, y: Tensor, steps: int, stalled: float) -> tuple[Tensor, Tensor]:
        """Local minima (m, k) near points (m, k), and the shares of f outside its span."""
        ends, shares = y.clone(), y.new_full((len(y),), torch.inf)
        active = torch.arange(len(y), device=y.device)
        damping = y.new_full(y.shape[:1], DAMPING)
        state, before = self._linearised(y), y.new_full((len(y),), torch.inf)
        for step in range(steps):
            gram, slope, value, _ = state
            damped = self._damped(gram, damping[:, None])
            trial = y - torch.linalg.solve_ex(damped, slope).result  # no number: no better
            moved = self._linearised(trial)
            better = moved[2] < value
            y = torch.where(better[:, None], trial, y)
            state = tuple(  # type: ignore[assignment]
                torch.where(better.view(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(moved, state, strict=True)
            )
            damping = (damping * torch.where(better, LESS, MORE)).clamp(1e-7, 1e6)
            ends[active], shares[active] = y, state[3]
            if (step + 1) % LOOKS == 0:  # those that have arrived, or do not move, are done
                going = state[2] < stalled * before
                before = state[2][going]
                y, active, damping = y[going], active[going], damping[going]
                state = tuple(one[going] for one in state)  # type: ignore[assignment]
                if not len(active):
                    break
        return ends, shares

    def _linearised(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """J^T J, J^T r, |r|^2 and |r|^2 / |f|^2 at points (m, k)."""
        (f, r), (gram, slopes) = self._residual(y), self._derivatives(y)
        value, slope = r.square().sum(1), _along(slopes, r)
        share = value / f.square().sum(1)
        if self.sphere is not None:
            vectors = self.sphere[0] + y @ self.sphere[1]
            off, steep = vectors.square().sum(1) - 1, 2 * vectors @ self.sphere[1].mT
            gram = gram + self.weight * steep[:, :, None] * steep[:, None]
            slope = slope + self.weight * off[:, None] * steep
            value = value + self.weight * off.square()
        return gram, slope, value, share

    def _residual(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """f with the bias' input (m, width + 1), and what of it lies outside its span."""
        f = _augmented(self.branch.between(self.before + y @ self.along), self.second)
        return f, f - (f @ self.rows.mT) @ self.rows

    def _derivatives(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """J^T J (m, k, k) of the residual, and the derivatives (m, k, width) of f."""
        slopes = self.branch.moved(self.before + y @ self.along, self.along)
        seen = slopes @ self.rows[:, : slopes.shape[2]].mT
        return slopes @ slopes.mT - seen @ seen.mT, slopes

    @staticmethod
    def _damped(gram: Tensor, damping: Tensor | float) -> Tensor:
        return gram + torch.diag_embed(damping * gram.diagonal(dim1=1, dim2=2).clamp_min(1e-12))


def _along(slopes: Tensor, r: Tensor) -> Tensor:
    """J^T r (m, k)."""
    return (slopes @ r[:, : slopes.shape[2], None])[:, :, 0]
