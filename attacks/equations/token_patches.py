r"""Patches, places and pictures of the tokens that `token_peeling` finds in a client step.

A token's patch x lies in the row space of the patch embedding's gradient; with the bias' it differs
from one point by at most N B - 1 directions. Up to a multiple of ones,

    s u = W x + b + e + (what attention added)

are D equations for the patch and the length s, which only the token's own position solves: its
embedding e, E_unk where MJP masked it, or none in a network without a table. Without the patch
embedding's gradient x may be any patch: exact still if it has `SPARE` values fewer than the
embedding is wide; else the most probable one is taken, or behind a norm none. A picture that was
put together tells itself what attention adds, more exactly than gradients do, and its layers'
inputs verify it (`layers`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from attacks.equations import PATCH, PATCH_BIAS, QKV
from attacks.equations.attention import SAME, PatchOrder, other_orders
from attacks.equations.block import (
    FC2,
    PROJ,
    Embedding,
    equations_hold,
    is_run_again,
    lacks_block,
    layer_scales,
    layers_read,
)
from attacks.equations.completion import complete, field_energy
from attacks.equations.layers import LayerSpans, lacks_layer_spans, layers_of
from attacks.equations.patch_system import gradient, in_levels, lacks_gradients, patch_rows
from attacks.equations.span import (
    Knowledge,
    hull_rows,
    masked_basis,
    split_hull,
)
from attacks.equations.token_peeling import PeeledTokens, tokens_of
from attacks.jigsaw import solve
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Refusal
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_images
from mjp_privacy.models.live.blocks import queries_keys_values
from mjp_privacy.models.vit import input_of

FITS, LOOSE = 1e-2, 0.3
"""Relative error of the equations of a patch that counts as found, and of one that is tried at a
place: at other places it is near 1, and near what attention's own error is before that is known."""
SPARE = 8  # equations more than values of a patch that tell a token's place
CONTRAST = 0.01  # share of a picture's contrast that the network must see
SINGULAR = 1e-6  # of the patch embedding's first singular value: what counts as 0
ASSIGNMENTS = 4  # times that the tokens of a picture are assigned to places
REFINEMENTS, IDLE = 24, 4
"""Times that attention is computed anew of a picture that was found, and times in a row that it may
fit no better before this ends."""


def needs_tokens(model: MJPVisionTransformer) -> tuple[str, ...]:
    """Gradients of block 0 behind its attention; those of the patch embedding, of biases and, to
    verify, of the first blocks' linear layers help where they are sent."""
    weights = [f"{name}.weight" for name in (*layers_read(model), *layers_of(model))]
    return (
        PATCH,
        *dict.fromkeys(weights),
        PATCH_BIAS,
        *(f"{one}.bias" for one in layers_read(model)),
    )


def lacks_tokens(view: AttackerView) -> Refusal | None:
    """Why no token can be found in an upload, or None."""
    model = view.model
    if (reason := lacks_block(model)) is not None:
        return Refusal("block", reason)
    refusal = lacks_gradients(view, *(f"{layer}.weight" for layer in layers_read(model)))
    batch = view.updates[0].batch
    refusal = refusal or lacks_layer_spans(model, batch)
    shared = model.tokens > model.grid.patches  # equal in all pictures until attention tells them
    if refusal is None and batch > 1 and shared and getattr(model.blocks[0], "beside", False):
        text = "its class token is read before attention, one for all pictures; batch 1 is needed"
        return Refusal("batch", text)
    names = dict(model.named_parameters())
    if refusal is None and model.unk_embed is not None and "index_embed" in names:
        text = "index embeddings tell masked patches' places, which is not read"
        return Refusal("model", text)
    before, after = model.patch_norms
    of_sums = not isinstance(getattr(model, "norm_pre", None), nn.Identity | None)
    if refusal is not None or (before is after is None and not of_sums):
        return refusal
    if before is not None and batch > 1:
        text = "patches are normalised before they are embedded: batch 1 is needed"
        return Refusal("batch", text)
    divided = after is not None or (of_sums and model.pos_embed is None)  # W n + b and no more
    if divided and model.patch_embed.proj.bias is None:
        text = "a norm behind an embedding without bias hides how much contrast a patch has"
        return Refusal("model", text)
    lacking, weight = lacks_gradients(view, PATCH), model.patch_embed.proj.weight.flatten(1)
    if lacking is None or tells_patches(weight):
        return None
    few = f"a token behind a norm tells up to {len(weight) - SPARE} values of a patch without it"
    return replace(lacking, text=f"{lacking.text}; {few}, of {weight.shape[1]}")


def tells_patches(weight: Tensor) -> bool:
    """Whether a patch has so few values that tokens tell them, with a patch embedding's weight
    (D, p), without its gradient."""
    width, values = weight.shape
    return values + SPARE <= width


def lacks_equations(model: MJPVisionTransformer, batch: int) -> str:
    """Why a client's network, in float64, does not compute what the equations say; or ""."""
    block: Any = model.blocks[0]
    if is_run_again(model):
        return "block 0's layers run more than once, so that their gradients are sums over depths"
    if not equations_hold(model):
        return "block 0 computes something else than the equations of its tokens"
    told = queries_keys_values(block.attn) is not None and hasattr(block, "norm1")
    if batch > 1 and not told:
        return f"block 0's attention does not tell whose tokens {batch} pictures' are"
    return ""


@dataclass(frozen=True)
class StepPicture:
    """A picture of a step; `token` (N,) is that of each place, -1 where none was found."""

    patches: Tensor  # (N, p), normalised
    token: Tensor
    hidden: Tensor  # (N,) bool: masked, or of a network without positions
    order: Tensor  # (N,)
    misfits: Tensor  # (N,): relative errors of their equations; NaN where none was found
    outside: float = math.nan
    """What share of its layers' inputs lies outside their spans, no more than noise explains; NaN
    where that is not so, or not known."""

    @property
    def misfit(self) -> float:
        """The largest relative error of a token's equations; NaN where no token was found."""
        known = self.misfits[self.misfits.isfinite()]
        return float(known.max()) if len(known) else math.nan

    def with_patches(self, places: Any, patches: Tensor, misfits: Tensor) -> StepPicture:
        """The picture with other patches at some places."""
        whole, errors = self.patches.clone(), self.misfits.clone()
        whole[places], errors[places] = patches, misfits
        return replace(self, patches=whole, misfits=errors)

    @property
    def is_verified(self) -> bool:
        """Whether its layers' inputs lie where a picture of the step has them."""
        return math.isfinite(self.outside)


class StepTokens:
    """What one client step says of its patches."""

    def __init__(
        self,
        view: AttackerView,
        update: ClientUpdate,
        step: int,
        model: MJPVisionTransformer,
        prior: str,
    ) -> None:
        self.view, self.model, self.count = view, model, model.grid.patches
        self.batch, self.precision = update.batch, update.dtype
        read = [name for name in needs_tokens(model) if name in update.grads]
        self.grads = {name: gradient(view, update, name)[step] for name in read}
        self.energy = field_energy(prior, model.patch_size, view.pixels).on(model.like.device)
        self.embedding = Embedding.of(model)
        self.weight = self.embedding.weight
        self.basis, self.anchor = self._span()
        self.moves = self.embedding.moves(self.basis, self.anchor)
        of_patch, others = self.moves[: len(self.basis)], self.moves[len(self.basis) :]
        values = torch.linalg.svdvals(of_patch - of_patch @ torch.linalg.pinv(others) @ others)
        everything = tells_patches(self.weight) and bool(values[-1] > SINGULAR * values[0])
        self.is_exact = PATCH in self.grads or everything  # a token tells its whole patch
        self.fits = FITS if self.is_exact else LOOSE
        self.back = torch.linalg.pinv(self.moves)
        nothing = self.weight.new_zeros(self.count, len(self.anchor))
        whole = self._given(model.blocks[0], self.embedding.inputs(nothing))
        places = slice(model.prefix, model.prefix + self.count)
        self.own, self.others = whole[places], [whole[: places.start], whole[places.stop :]]
        if self.embedding.sums:
            self.own = self._given(model.norm_pre, nothing)[places]
        elif self.embedding.before is not None or self.embedding.after is not None:
            self.own = self.own - self.embedding(nothing) + self.embedding.constant
        self.tells_places = bool((self.own != self.own[:1]).any())
        self.masked = None
        self.step, self.update = step, update
        if model.unk_embed is not None and model.pos_embed is not None:
            table = model.pos_embed.detach()
            rows = patch_rows(model, table.view(1, *table.shape))[0]
            self.masked = self.own - rows + model.unk_embed.detach()[0]

    def _span(self) -> tuple[Tensor, Tensor]:
        """The directions (q, p) and one point (p,) of the affine space of all patches; without a
        bias' gradient of their span. Without the patch embedding's gradient all directions, or the
        likeliest where a patch has nearly as many values as there are equations for it."""
        if PATCH not in self.grads:
            patch, width = self.weight.shape[1], len(self.weight)
            known = patch if tells_patches(self.weight) else width // 2
            centre = self.energy.mean.repeat_interleave(self.model.patch_size**2)
            likeliest = torch.linalg.eigh(self.energy.patch_precision).eigenvectors.mT
            return likeliest[:known], centre
        most, total = self.count * self.batch, self.grads[PATCH].flatten(1)
        if PATCH_BIAS not in self.grads:
            return masked_basis(total, most), total.new_zeros(total.shape[1])
        return split_hull(hull_rows(total, self.grads[PATCH_BIAS].unsqueeze(1), most))

    def _given(self, layer: nn.Module, patches: Tensor, hidden: Tensor | None = None) -> Tensor:
        """What a layer is given for a picture (N, p) of which some patches are masked."""
        patches = self.embedding.contrasts(patches)
        x = to_images(patches, self.model.grid, self.model.patch_size).unsqueeze(0)
        network: Any = self.model
        if self.model.unk_embed is not None and hidden is not None:
            network = partial(self.model, mask=hidden.unsqueeze(0))
        with torch.no_grad():
            return input_of(network, layer, x)[0]

    def pictures(self) -> list[StepPicture]:
        """The step's pictures. Searches start as the step's own gradient has it, so that what other
        steps are attacked with it changes nothing."""
        sent = self.grads[f"{FC2}.weight"].cpu().numpy().tobytes()
        generator = torch_generator("token peeling", hashlib.sha256(sent).hexdigest())
        most = self.batch * self.model.tokens
        tokens = tokens_of(self.model, self.grads, most, generator)
        if tokens is None:
            return [self._pictured(self._nothing())] * self.batch
        added = self._added(tokens)
        places = self._fitted(tokens, added, self.own)
        found = self._found(tokens, added, places)
        return [self._verified(self._pictured(one)) for one in found]

    def _pictured(self, found: StepPicture) -> StepPicture:
        """The picture in pixels, with the most probable patches where none was found."""
        found = self._filled(found)
        known = found.token >= 0
        pixels = self.embedding.pixels(found.patches, known, self.energy, self.view.pixels)
        return replace(found, patches=pixels)

    def _verified(self, found: StepPicture) -> StepPicture:
        """The picture with what share of its layers' inputs lies outside their spans, where that is
        what noise leaves there. Where borders told an order, it counts only if the network sees it:
        all parts of the picture in each other, and no other order alike. Nor may another contrast
        be alike, which behind a norm only the patch embedding's gradient tells beside tokens."""
        ordered = bool(found.hidden.any())
        if (ordered and self.masked is not None) or not bool((found.token >= 0).all()):
            return found
        if not self.is_exact or self.embedding.before is not None:
            return found  # other pictures have the same tokens
        spans = LayerSpans.of(self.model, self.grads, self.batch, self.precision)
        if spans is None or spans.bases.keys() <= {QKV.removesuffix(".weight")}:
            return found  # block 0's first layer sees each patch alone
        patches = found.patches

        def outside(shown: Tensor) -> float:
            """Its share, or NaN where that is more than noise explains."""
            share = spans.share(shown)
            return share if spans.passes(shown, share) else math.nan

        share = outside(patches)
        others: Iterable[Tensor] = ()
        if ordered and math.isfinite(share):
            if self.batch == 1 and not spans.is_coherent(patches):  # batches passed
                return found
            moved = (patches[order] for order in other_orders(self.model.grid))
            others = (x for x in moved if float((x - patches).norm() / patches.norm()) > SAME)
        if PATCH not in self.grads and self.embedding.after is not None:
            others = chain(others, (patches * (1 + change) for change in (CONTRAST, -CONTRAST)))
        alike = math.isfinite(share) and any(math.isfinite(outside(one)) for one in others)
        return found if alike else replace(found, outside=share)

    def _nothing(self) -> StepPicture:
        patches, order = self.anchor.expand(self.count, -1).clone(), torch.arange(self.count)
        none = torch.zeros(self.count, dtype=torch.bool, device=patches.device)
        return StepPicture(patches, none.long() - 1, none, order, patches[:, 0] * math.nan)

    # a token's patch and place ------------------------------------------------------------------

    def _added(self, tokens: PeeledTokens) -> Tensor:
        """(T, D) what attention adds to block 0's inputs; where gradients do not show it, what it
        adds to the most probable picture's, the same for all tokens."""
        attended = tokens.attended
        if tokens.beside:
            return torch.zeros_like(tokens.directions)
        if attended is None:
            likely = self._filled(self._nothing()).patches
            attended = self._given(self._out, likely).mean(0).expand(len(tokens), -1)
        return self._attention(attended)

    @property
    def _out(self) -> Any:
        return self.model.get_submodule(PROJ)

    def _attention(self, attended: Tensor) -> Tensor:
        added: Tensor = layer_scales(self.model.blocks[0])[0](self._out(attended)).detach()
        return added

    def _fitted(self, tokens: PeeledTokens, added: Tensor, offsets: Tensor) -> Tensor:
        """Relative errors (T, n) of tokens' equations with each of the embeddings (n, D).

        r = s u = offset + added + W x with s and x unknown: what of it lies off W x and off u.
        """

        def off(vectors: Tensor) -> Tensor:
            return vectors - vectors @ self.back @ self.moves

        directions, nothing = self.embedding.scaled(tokens.directions), torch.zeros_like(added[:1])
        known, along = partial(self.embedding.known, self.anchor), off(directions)
        lengths = along.square().sum(1, keepdim=True)
        if self.embedding.sums:  # s and 1 / sigma are unknown
            here = off(known(nothing, added))
            there = off(self.embedding.scattered(self.anchor, offsets))
            both, size = along @ there.mT, there.square().sum(1)
            first, second = (along * here).sum(1, keepdim=True), here @ there.mT
            free = (lengths * size - both.square()).clamp_min(torch.finfo(both.dtype).tiny)
            s = (size * first - both * second) / free
            inverse = (both * first - lengths * second) / free
            squares = here.square().sum(1, keepdim=True) - s * first + inverse * second
            return squares.clamp_min(0).sqrt() / (s.abs() * directions.norm(dim=1, keepdim=True))
        there, here = off(known(offsets, nothing)), off(self.embedding.reduced(added))
        squares = there.square().sum(1) + here.square().sum(1)[:, None] + 2 * here @ there.mT
        inner = along @ there.mT + (along * here).sum(1, keepdim=True)
        scale = (inner / lengths).abs() * directions.norm(dim=1, keepdim=True)
        return (squares - inner.square() / lengths).clamp_min(0).sqrt() / scale

    def _patches(self, directions: Tensor, added: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Patches (m, p) of m tokens with these embeddings, and the relative errors (m,)."""
        right = self.embedding.known(self.anchor, offsets, added)
        directions = self.embedding.scaled(directions)
        if not self.embedding.sums:
            return self._solved(directions, right, self.moves, self.back)
        solved = []
        for one, known, place in zip(directions, right, offsets.expand_as(right), strict=True):
            moves = self.embedding.moves(self.basis, self.anchor, place)
            solved.append(self._solved(one[None], known[None], moves, torch.linalg.pinv(moves)))
        patches, misfits = zip(*solved, strict=True)
        return torch.cat(patches), torch.cat(misfits)

    def _solved(
        self, directions: Tensor, right: Tensor, moves: Tensor, back: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Patches (m, p) of tokens with these known vectors (m, D), and relative errors (m,)."""

        def off(vectors: Tensor) -> Tensor:
            return vectors - vectors @ back @ moves

        along = off(directions)
        scale = (off(right) * along).sum(1, keepdim=True) / along.square().sum(1, keepdim=True)
        rest = scale * directions - right
        misfit = off(rest).norm(dim=1) / (scale * directions).norm(dim=1)
        return self.embedding.patches(rest @ back, self.basis, self.anchor), misfit

    def _refined(self, tokens: PeeledTokens, found: StepPicture) -> StepPicture:
        """The same with what block 0's attention adds to this very picture, where that fits better:
        more exact than what gradients say of it."""
        known, best, idle = found.token >= 0, found, 0
        if tokens.beside or not bool(known.any()):
            return found
        offsets = self._offsets(found.hidden)
        directions = tokens.directions
        if tokens.taken_out is not None:  # which this very picture's takes the place of
            scaled = layer_scales(self.model.blocks[0])[0]
            directions = directions + centred(scaled(tokens.taken_out @ self._out.weight.mT))
        for _ in range(REFINEMENTS):
            added = self._attention(self._sums(found))
            patches, misfits = self._patches(
                directions[found.token[known]], added[known], offsets[known]
            )
            found = found.with_patches(known.nonzero().flatten(), patches, misfits)
            idle = 0 if found.misfit < best.misfit else idle + 1
            best = best if idle else found
            if idle == IDLE:
                break
        return best

    def _sums(self, found: StepPicture) -> Tensor:
        """(N, D) what attention adds up to at the patches of a picture."""
        attended = self._given(self._out, self._filled(found).patches, found.hidden)
        return attended[self.model.prefix : self.model.prefix + self.count]

    def _offsets(self, hidden: Tensor) -> Tensor:
        if self.masked is None:
            return self.own
        return torch.where(hidden[:, None], self.masked, self.own)

    def _filled(self, found: StepPicture) -> StepPicture:
        """The picture with the most probable patches in place of those that were not found."""
        known = found.token >= 0
        if bool(known.all()) or self.embedding.before is not None:
            return found
        knowledge = Knowledge(self.anchor.expand(self.count, -1), self.basis, ~known)
        return replace(found, patches=complete(knowledge, self.energy, known, found.patches))

    # one picture ----------------------------------------------------------------------------------

    def _found(self, tokens: PeeledTokens, added: Tensor, places: Tensor) -> list[StepPicture]:
        """The picture of a step of one, with these errors (T, N) of tokens' equations at places;
        where gradients say too little of what attention added, tokens are assigned again with what
        attention adds to it."""
        for _ in range(ASSIGNMENTS):
            found = self._refined(tokens, self._assigned(tokens, added, places))
            told = tokens.beside or tokens.taken_out is not None  # attention changes nothing
            if told or not found.misfit > self.fits:
                break
            known = found.token >= 0
            added = added.clone()
            added[found.token[known]] = self._attention(self._sums(found))[known]
            places = self._fitted(tokens, added, self.own)
        fits = found.misfits <= self.fits
        found = replace(found, token=torch.where(fits, found.token, -1))
        return [found if self.is_exact else self._completed(tokens, added, found)]

    def _completed(self, tokens: PeeledTokens, added: Tensor, found: StepPicture) -> StepPicture:
        """The picture that the prior makes of a token's equations alone, which are fewer than a
        patch has values: without the patch embedding's gradient."""
        known = found.token >= 0
        behind = self.embedding.before is not None or self.embedding.after is not None
        if behind or tokens.lengths is None or not bool(known.any()):
            return found
        offsets = self._offsets(found.hidden)
        left, values, right = torch.linalg.svd(centred(self.weight.mT).mT)
        shown = int((values > SINGULAR * values[0]).sum())
        taken, free = right[:shown], right[shown:]
        given = tokens.directions * tokens.lengths[:, None] - centred(added)
        given = given[found.token[known]] - centred(offsets[known])
        solved = given @ left[:, :shown] / values[:shown] @ taken
        patches = (self.anchor @ taken.mT @ taken).expand(self.count, -1).clone()
        patches[known] = solved
        likely = complete(Knowledge(patches, free, found.hidden), self.energy)
        return found.with_patches(known, likely[known], found.misfits[known])

    def _assigned(self, tokens: PeeledTokens, added: Tensor, places: Tensor) -> StepPicture:
        """The picture with each token where its equations fit best, at most N tokens."""
        found, count = self._nothing(), self.count
        masked, (shown, place) = torch.full_like(places[:, 0], torch.inf), places.min(1)
        if not self.tells_places:
            masked, shown = shown, masked
        elif self.masked is not None:
            masked = self._fitted(tokens, added, self.masked[:1])[:, 0]
        best = torch.minimum(shown, masked)
        kept = (best <= best.sort().values[:count][-1]) & (best < LOOSE)
        token = found.token.clone()
        for one in shown.argsort(descending=True).tolist():
            if bool(kept[one]) and float(shown[one]) <= float(masked[one]):
                token[place[one]] = one
        here = (token >= 0).nonzero().flatten()
        if len(here):
            rows = token[here]
            solved = self._patches(tokens.directions[rows], added[rows], self.own[here])
            found = replace(found, token=token).with_patches(here, *solved)
        pieces = (kept & (masked < shown)).nonzero().flatten()
        if not len(pieces):
            return found
        offset = self.own[:1] if self.masked is None else self.masked[:1]
        loose, misfit = self._patches(tokens.directions[pieces], added[pieces], offset)
        return self._placed(found, pieces, loose, misfit, tokens)

    def _placed(
        self,
        found: StepPicture,
        pieces: Tensor,
        loose: Tensor,
        misfit: Tensor,
        tokens: PeeledTokens,
    ) -> StepPicture:
        """The picture with the patches (k, p) of tokens `pieces` where their borders fit, and then
        where attention says."""
        hidden = found.token < 0
        places = hidden.nonzero().flatten()
        lacking = len(places) - len(pieces) if tokens.complete else 0
        if lacking > 0:  # equal patches are one token
            flattest = loose.std(-1).argmin().expand(lacking)
            every = torch.cat((torch.arange(len(pieces)).to(flattest), flattest))
            pieces, loose, misfit = pieces[every], loose[every], misfit[every]
        best = misfit.argsort()[: len(places)]
        best = best[loose[best].sum(1).argsort()]  # whatever order they were found in
        places = places[: len(best)]
        token, hidden = found.token.clone(), found.token < 0
        token[places] = pieces[best]
        found = replace(found, token=token).with_patches(places, loose[best], misfit[best])
        patches, size = found.patches, self.model.patch_size
        levels = in_levels(patches, self.view.pixels, size).clamp(0, 1)
        order = solve(levels, hidden, levels[hidden], grid=self.model.grid, patch_size=size)
        there = torch.empty_like(order)
        there[order] = torch.arange(self.count)
        there = there.to(patches.device)
        if self.masked is None and self.is_exact and bool((token >= 0).all()):
            attention = PatchOrder.of(
                self.view, self.update, self.step, self._others(tokens, token)
            )
            if attention is not None:
                there = there[attention.found(patches[there])[0]]
                order = there.argsort().to(order)
        moved = replace(found, token=token[there], hidden=hidden, order=order)
        return moved.with_patches(slice(None), patches[there], found.misfits[there])

    def _others(self, tokens: PeeledTokens, own: Tensor) -> Tensor | None:
        """What the layer behind attention receives of other tokens than a picture's `own`."""
        return None


def centred(vectors: Tensor) -> Tensor:
    return vectors - vectors.mean(-1, keepdim=True)
