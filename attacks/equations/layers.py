r"""What the weight gradients of the first blocks say of a picture: where its layers' inputs lie.

The weight gradient of a linear layer is a sum over all tokens t of all B pictures of a step,

    dL/dW = sum_t d_t h_t^T,

d_t the gradient at the layer's output, h_t its input. Its row space is the span of the h_t, T = B
(N + 1) directions of the layer's width. So a picture stands in the batch only if all inputs of all
layers lie in their spans, which a run of the network *forward* shows: no label enters, and each
picture is tested by itself. The layers behind block 0's attention see sums over its softmax, so
that a picture put together from patches of several ones does not pass (cf. SPEAR, Dimitrov et al.
2024; DAGER, Petrov et al. 2024; as an objective for text TIGER, arXiv 2606.18312).

**Search** (`LayerSearch`). The unknowns are a in X = C + a V (`equations.batches`), in coordinates
in which patches of photographs have unit variance. L-BFGS minimises what lies outside
(`LayerSpans.off`), at first with a small weight on the energy of the field prior, which ends at
zero. Its local minima are pictures in which every patch is nearly that of *one* picture of the
batch, but not all of the same. So B searches go together: each starts at what the mean picture
leaves for it after those before. Then patches are exchanged between the local minima a rectangle at
a time while that lessens what lies outside.

**Taken out** (`StepUpload.without`). The upload is the mean of the pictures' gradients. With a
picture and its class the attacker computes its gradient as the client did, which leaves that of the
others. The class is read off the classifier: dL/dhead.weight = sum_b d_b h_b^T / B with d_b =
softmax - onehot, so d_b lies in its column space, which holds for one class only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.budget import spent
from attacks.equations import HEAD, TABLE
from attacks.equations.batches import Superposition
from attacks.equations.patch_system import gradient, lbfgs, patch_system, weights
from mjp_privacy.interfaces import AttackerView, ClientUpdate, Grads, Refusal
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import Grid, to_images
from mjp_privacy.models.vit import copied, input_of, pictures_first

GAP = 30.0
"""Times the singular value after it that the last of a layer's tokens must be. Equal pictures are
fewer tokens; of a last block, whose class token alone has a gradient, others do not show."""


BLOCKS = 2  # of the first blocks, whose layers verify a picture


def layers_of(model: MJPVisionTransformer) -> list[str]:
    """Names of the linear layers of the first blocks, such as blocks.0.mlp.fc1."""
    stack = getattr(model, "blocks", nn.Sequential())  # a Swin's stages have none of this name
    return [
        f"blocks.{number}.{name}"
        for number, block in enumerate(list(stack.children())[:BLOCKS])
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
    ]


def lacks_layer_spans(model: MJPVisionTransformer, batch: int) -> Refusal | None:
    """Why the layers' inputs of so many pictures fill their whole width, or None."""
    tokens, width = model.tokens, model.token_width
    if tokens < model.grid.patches:
        return Refusal("block", model.other_tokens)
    if batch * tokens < width:
        return None
    most, others = (width - 1) // tokens, tokens - model.grid.patches
    way_out = f"batches of at most {most} do"
    if not most:
        way_out = f"one picture of up to {width - 1 - others} patches does"
    if others >= width - 1:
        way_out = f"no picture does beside {others} other tokens"
    return Refusal(
        "underdetermined",
        f"B T = {batch} × {tokens} = {batch * tokens} tokens of a batch >= D = {width}: their "
        f"spans leave a layer's inputs unknown unless B T < D; {way_out}",
    )


FOUND = 1e5
"""Times the precision of the gradients, squared, that may lie outside for a picture to count as
found: a patch that is off by one part in 10^4 leaves as much."""
DOUBTED, MOST = 4.0, 1e-7
"""Times what the gradients' own noise is expected to leave outside that may do so as well, and the
most: a patch that is off by one part in 10^3 leaves as much."""


@dataclass(frozen=True)
class LayerSpans:
    """Orthonormal bases of the spans of layers' inputs."""

    model: MJPVisionTransformer
    bases: Mapping[str, Tensor]  # by layer, (T, width), float64
    doubts: Mapping[str, Tensor]
    """By layer, (T,): what noise moves of each direction of the basis out of the true span, squared
    and expected: its variance on an entry, (width - T) times, over the singular value squared."""
    batch: int
    enough: float  # the share of inputs that may lie outside whatever the noise

    @classmethod
    def of(
        cls, model: MJPVisionTransformer, grads: Grads, batch: int, dtype: torch.dtype
    ) -> LayerSpans | None:
        """The spans in one step's gradients (*shape) of at most `batch` pictures, of layers that
        show as many tokens as any does; None where none of the first blocks' shows any.

        dtype  in which the client computed
        """
        tokens, bases, doubts = batch * model.tokens, {}, {}
        layers = layers_of(model)
        with torch.no_grad(), inputs_of(model, layers) as seen:
            through_blocks(model, model.probe())
        for name in layers:
            if name not in seen or f"{name}.weight" not in grads:
                continue  # some networks use a layer's weight alone, and do not call it
            sent = grads[f"{name}.weight"].double()
            s, vh = torch.linalg.svd(sent, full_matrices=False)[1:]
            ends = (s[:-1] > GAP * s[1:])[:tokens].nonzero()
            if tokens < len(s) and len(ends):
                shown = int(ends[-1]) + 1
                bases[name] = vh[:shown]
                free = sent.shape[1] - shown
                variance = s[shown:].square().sum() / (max(sent.shape[0] - shown, 1) * free)
                doubts[name] = variance * free / s[:shown].square()
        most = max(map(len, bases.values()), default=0)
        bases = {name: basis for name, basis in bases.items() if len(basis) == most}
        enough = FOUND * torch.finfo(dtype).eps ** 2
        return cls(model, bases, doubts, batch, enough) if bases else None

    def off(self, pictures: Tensor) -> Tensor:
        """What share of the layers' inputs lies outside their spans, squared, the mean over layers;
        (m,) for normalised pictures (m, N, p)."""
        of_layers = self._outside(pictures)
        return torch.stack([rest.sum(1) / length.sum(1) for rest, length in of_layers]).mean(0)

    def share(self, picture: Tensor) -> float:
        """The same of one picture (N, p)."""
        with torch.no_grad():
            return float(self.off(picture[None]))

    def _inputs(self, pictures: Tensor) -> dict[str, Tensor]:
        """The layers' inputs (m, T, width) for pictures (m, N, p)."""
        images = to_images(pictures, self.model.grid, self.model.patch_size)
        with inputs_of(self.model, self.bases) as seen:
            through_blocks(self.model, images.to(self.model.like))
            return {name: seen[name] for name in self.bases}

    def _outside(self, pictures: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By layer, what of each token's input (m, T) lies outside, and that input, squared."""
        found = list[tuple[Tensor, Tensor]]()
        for name, inputs in self._inputs(pictures).items():
            basis = self.bases[name].to(inputs)
            rest = inputs - (inputs @ basis.mT) @ basis
            found.append((rest.square().sum(2), inputs.detach().square().sum(2)))
        return found

    def sees_mixtures(self, picture: Tensor) -> bool:
        """Whether a mixture of the batch's pictures would not pass, as one picture (N, p) shows."""
        return self.batch == 1 or self.is_coherent(picture)

    def is_coherent(self, picture: Tensor) -> bool:
        """Whether every part of a picture (N, p), one patch or several such as a window of
        attention, shows in tokens of the rest: else another picture's part could stand there. Each
        patch in turn is exchanged for the one that is least like it.

        Where a new network's branches are nearly nothing, its tokens do not see each other.
        """
        patches = picture.to(self.model.like)
        places = torch.arange(len(patches), device=patches.device)
        trials = patches.expand(len(patches), -1, -1).clone()
        trials[places, places] = patches[torch.cdist(patches, patches).argmax(1)]
        shown = list[Tensor]()
        with torch.no_grad():
            for some in trials.split(AT_ONCE):
                of_layers = self._outside(some)
                parts = [rest / length.sum(1, keepdim=True) for rest, length in of_layers]
                shown.append(torch.stack(parts).mean(0))
        shares = torch.cat(shown).double()  # (N, T): what of each patch's exchange each token shows
        shares[places, self.model.prefix + places] = 0
        least = shares.sum(1).min(0)
        trial = trials[least.indices]
        # How much two patches show in each other's tokens, and both together in tokens of no patch.
        ends = self.model.prefix, self.model.prefix + len(patches)
        before, own, after = shares.tensor_split(ends, 1)
        others = torch.cat((before, after), 1)
        total = others.sum(0).clamp_min(torch.finfo(shares.dtype).tiny)
        tied = own + own.mT + (others / total) @ others.mT
        shows = min(float(least.values), smallest_cut(tied))
        return shows > DOUBTED * self.share(patches) and not self.fits(trial, shows)

    def passes(self, picture: Tensor, share: float) -> bool:
        """Whether a picture fits that counts as found, because no mixture would."""
        return self.fits(picture, share) and self.sees_mixtures(picture)

    def fits(self, picture: Tensor, share: float) -> bool:
        """Whether a normalised picture (N, p) of which this share lies outside lies in the spans:
        as `enough` says, or as noise would have it of this picture."""
        if share <= self.enough or share > MOST:
            return share <= self.enough
        expected = []
        with torch.no_grad():
            for name, seen in self._inputs(picture[None]).items():
                inputs = seen[0].double()
                outside = (inputs @ self.bases[name].mT).square() @ self.doubts[name]
                expected.append(outside.sum() / inputs.square().sum())
        return share <= DOUBTED * float(torch.stack(expected).mean())


def smallest_cut(weights: Tensor) -> float:
    """The least sum of weights (n, n) between two parts of n things, by Stoer and Wagner's way.

    smallest_cut(torch.block_diag(torch.ones(3, 3), torch.ones(2, 2))) == 0
    """
    between, least = weights.double().cpu().numpy().copy(), math.inf
    np.fill_diagonal(between, 0)
    while len(between) > 1:
        bound, last, before, cut = between[0].copy(), 0, 0, math.inf
        bound[0] = -math.inf
        for _ in range(len(between) - 1):  # the one that is bound most to those before it
            last, before = int(bound.argmax()), last
            cut = float(bound[last])
            bound += between[last]
            bound[last] = -math.inf
        least = min(least, cut)
        between[before] += between[last]
        between[:, before] += between[:, last]
        between[before, before] = 0
        between = np.delete(np.delete(between, last, 0), last, 1)
    return least


def through_blocks(model: MJPVisionTransformer, pictures: Tensor) -> Tensor:
    """The tokens (B, T, D) of normalised pictures after the first blocks."""
    following = list(model.blocks.children())[BLOCKS:]
    if following:
        return input_of(model, following[0], pictures)
    return model.forward_features(pictures)


@contextmanager
def inputs_of(model: MJPVisionTransformer, layers: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """A `with` block in which the inputs of these layers are kept, by name."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        """The hook that keeps the input of one layer."""

        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = pictures_first(layer, inputs[0])

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# a search for one picture -------------------------------------------------------------------------


STAGES = ((1e-3, 60), (1e-5, 60), (0.0, 100))
"""Weight of the prior's energy per pixel, and steps of L-BFGS; then further stages without it."""
FURTHER = 4  # further stages, as long as each divides what lies outside by GAIN
GAIN = 3.0
EXCHANGES = 12  # of rectangles, at most, for one picture
MATES = 6  # the latest local minima, whose patches are tried in each other's places
AT_ONCE = 64  # pictures that the network sees together
HISTORY = 50  # steps that L-BFGS remembers
SPREAD = 0.7  # standard deviations of the prior by which random starts leave the mean picture
Stages = Sequence[tuple[float, int]]


@dataclass
class LayerSearch:
    """A search for one picture: LayerSearch(spans, guess).found(12, generator)."""

    spans: LayerSpans
    guess: Superposition

    def __post_init__(self) -> None:
        basis, mean = self.guess.basis, self.guess.mean
        self.units, root = self.guess.units
        self.energy = self.guess.energy
        self.back = basis.mT @ root
        self.known = mean - (mean @ basis.mT) @ basis
        self.centre = self.energy.mean.repeat_interleave(self.energy.patch_size**2)

    def found(self, searches: int, generator: torch.Generator) -> tuple[Tensor, float] | None:
        """Patches (N, p) of one picture and its share, which fits; None where so many searches
        find none, or a mixture would look like one."""
        if not len(self.units):
            mean, share = self.guess.mean, self.spans.share(self.guess.mean)
            return (mean, share) if self.spans.passes(mean, share) else None
        group, pool = list[Tensor](), list[Tensor]()
        for start in self._starts(searches, group, generator):
            patches, share = self._descended(start, STAGES)
            group.append(patches)
            pool.append(patches)
            if not self.spans.fits(patches, share) and len(pool) > 1:
                patches, share = self._recombined(patches, torch.stack(pool[-MATES:]))
                patches, share = self._descended(patches, STAGES[-1:])
            if self.spans.fits(patches, share):
                if not self.spans.sees_mixtures(patches):
                    return None  # so that no other search tells a picture, either
                spans = replace(self.spans, model=copied(self.spans.model).double())
                return LayerSearch(spans, self.guess)._descended(patches, STAGES[-1:])
            if spent():
                return None
        return None

    def _starts(
        self, searches: int, group: list[Tensor], generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Patches (N, p) to start from: B at a time, the first a guess or a random picture, the
        others what the mean picture leaves for them after the `group` found so far."""
        batch = self.spans.batch
        smoothest, rest = self.guess.pictures(batch)[:2]
        first = [rest, smoothest, self.guess.mean]
        for _ in range(searches):
            if len(group) == batch:
                group.clear()
            if group:
                yield (batch * self.guess.mean - sum(group)) / (batch - len(group))
            elif first:
                yield first.pop(0)
            else:
                noise = torch.randn(len(self.known), len(self.units), generator=generator)
                yield self.guess.mean + SPREAD * noise.to(self.known) @ self.units

    def _recombined(self, start: Tensor, pool: Tensor) -> tuple[Tensor, float]:
        """A picture (N, p) and its share: `start` after rectangles of patches were exchanged one by
        one for those of the pool (K, N, p), as long as that lessens what lies outside."""
        best, least = start, self.spans.share(start)
        regions = rectangles(self.spans.model.grid).to(start.device)
        at_once = max(1, AT_ONCE // len(pool))
        for _ in range(EXCHANGES):
            better = least, best
            for some in regions.split(at_once):
                trials = torch.where(some[:, None, :, None], pool, best).flatten(0, 1)
                with torch.no_grad():
                    shares = self.spans.off(trials)
                if float(shares.min()) < better[0]:
                    better = float(shares.min()), trials[shares.argmin()]
            if better[0] >= least or spent():
                break
            least, best = better
        return best, least

    def _descended(self, start: Tensor, stages: Stages) -> tuple[Tensor, float]:
        """The local minimum near a start, and its share."""
        moves, share = ((start - self.known) @ self.back).requires_grad_(), float("inf")
        for weight, steps in stages:
            share = self._stage(moves, weight, steps)
        for _ in range(FURTHER):
            before = share
            if spent():
                break
            share = self._stage(moves, 0.0, stages[-1][1])
            if share * GAIN > before:
                break
        return self._patches(moves.detach()), share

    def _patches(self, moves: Tensor) -> Tensor:
        return self.known + moves @ self.units

    def _stage(self, moves: Tensor, weight: float, steps: int) -> float:
        """Some steps of L-BFGS on `moves`, in place; the share outside after them."""
        scale, least = 0.0, (float("inf"), moves.detach().clone())
        optimizer = lbfgs(moves, steps, HISTORY)

        def closure() -> Tensor:
            """The objective in units of its first value, so that no step is lost to rounding."""
            nonlocal scale, least
            optimizer.zero_grad()
            patches = self._patches(moves)
            outside = self.spans.off(patches.unsqueeze(0))[0].double()
            total, share = outside, float(outside.detach())
            if share < least[0]:
                least = share, moves.detach().clone()
            if weight:
                away = (patches - self.centre).detach()
                pull = weight * self.energy.force(away) / away.numel()
                # Linear in the patches with the energy's derivative; its value stands beside it.
                total = (
                    total + (pull * patches).sum() - (pull * (patches - away / 2)).detach().sum()
                )
            scale = scale or max(float(total.detach()), 1e-300)
            (total / scale).backward()
            return (total / scale).detach()

        optimizer.step(closure)
        if not weight:
            with torch.no_grad():
                moves.copy_(least[1])
        return self.spans.share(self._patches(moves.detach()))


@cache
def rectangles(grid: Grid) -> Tensor:
    """Rectangles of patches, (R, N) bool: all of a small grid, of a large one some of each size."""
    stretches = list[Tensor]()  # places one after another of each side, (R, side) bool
    for side in grid:
        ends = torch.tensor(
            [
                (first, last)
                for first in range(side)
                for last in range(first, side)
                if first % max(1, (last - first) // 2, side // 4) == 0 or last == first
            ]
        )
        places = torch.arange(side)
        stretches.append((places >= ends[:, :1]) & (places <= ends[:, 1:]))
    down, across = stretches
    return (down[:, None, :, None] & across[None, :, None, :]).flatten(2).flatten(0, 1)


# a known picture, taken out of the upload ---------------------------------------------------------


@dataclass(frozen=True)
class StepUpload:
    """The gradients of one step of the pictures that are left, and the model that made them."""

    model: MJPVisionTransformer  # with the weights that the client used
    update: ClientUpdate  # of one step, as gradients; its batch counts the pictures that are left

    @classmethod
    def of(
        cls, view: AttackerView, update: ClientUpdate, step: int, model: MJPVisionTransformer
    ) -> StepUpload:
        """One step of an upload, without what no picture has part in, such as L_DAL's gradient.

        model  `client_model` of the upload
        """
        step_alone = update.part(slice(step, step + 1))
        grads = {name: gradient(view, step_alone, name) for name in step_alone.grads}
        table = grads[TABLE].flatten(1, -2).clone()
        table[:, view.model.rows_of_patches] = patch_system(view, step_alone).rows
        grads[TABLE] = table.view_as(grads[TABLE])
        return cls(model, replace(step_alone, kind="gradient", grads=grads, dal_lambda=0.0))

    @property
    def grads(self) -> dict[str, Tensor]:
        """The gradients by name, each (*parameter.shape)."""
        return {name: sent[0] for name, sent in self.update.grads.items()}

    def without(self, patches: Tensor) -> StepUpload:
        """The upload of the other pictures, with a picture (N, p) and its gradient taken out."""
        model, grads, batch = self.model, self.grads, self.update.batch
        picture = to_images(patches, model.grid, model.patch_size).unsqueeze(0).to(model.like)
        with torch.no_grad():
            likely = model(picture)[0].double().softmax(-1)
        u = torch.linalg.svd(grads[HEAD].double(), full_matrices=False)[0][:, :batch]
        # |d - u u^T d|^2 for d = likely - onehot(c), for all classes c at once.
        lengths = likely.square().sum() - 2 * likely + 1
        inside = (likely @ u - u).square().sum(-1)
        label = ((lengths - inside) / lengths).argmin()
        own = {n: p.detach().requires_grad_() for n, p in model.named_parameters() if n in grads}
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            logits = functional_call(model, own, (picture,))
            loss = nn.functional.cross_entropy(logits, label[None])
            parts = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        rest = {}
        for name, part in zip(own, parts, strict=True):
            total = batch * grads[name].double() - (0 if part is None else part.double())
            rest[name] = (total / (batch - 1)).unsqueeze(0)
        return replace(self, update=replace(self.update, grads=rest, batch=batch - 1))


def client_model(view: AttackerView, update: ClientUpdate) -> MJPVisionTransformer:
    """A copy of the model with the weights that the client used; none is differentiated."""
    model = copied(view.model).requires_grad_(False)
    with torch.no_grad():
        parameters = dict(model.named_parameters())  # also a table that `pos_embed` leaves out
        for name, value in weights(view, update).items():
            parameters[name].copy_(value)
    return model
