r"""How a network embeds one patch, and what its block 0 computes behind attention.

A plain ViT embeds a patch as z = W x + b + e. Networks that normalise patches first, embedded ones
afterwards, or both (vit-pytorch's), compute

    n = before(x),    y = W n + b,    z = after(y) + e,    after(y) = w (y - mean) / sigma + c.

With mean and sigma unknown, a token z + added = s u + (multiple of ones) gives D equations,

    s u / w - (e + c + added) / w = (W n + b) / sigma - mean / sigma - (multiple of 1 / w),

linear in n / sigma, 1 / sigma, s and the two multiples. Where positions are added before the last
norm (CLIP's ln_pre), y = W n + b + e, and 1 / sigma multiplies e as well. Of x, n tells all but the
mean: its variance is told by the norm's eps and then by 8-bit pixels, the mean guessed.

Behind attention

    r = z + scaled(out(attended)),    block 0's output = r + scaled(second(between(first(norm(r)))))

or with norms of the sums, as torch's encoder layers have them, or with both branches beside each
other, given z. The two first layers of a gate are one layer of both outputs. The layers' names are
timm's, in a live network too (`live.blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap

from attacks.equations.completion import FieldEnergy, complete, fewest_steps
from attacks.equations.layers import inputs_of
from attacks.equations.patch_system import normalisation, normalised
from attacks.equations.span import Knowledge
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.live.blocks import GATED, Named
from mjp_privacy.models.network_parts import run_of
from mjp_privacy.models.vit import (
    TokenNorm,
    copied,
    first_tensor,
    input_of,
    pictures_first,
    token_norm,
)

BLOCK = "blocks.0"
PROJ, FC1, FC2 = (f"{BLOCK}.{name}" for name in ("attn.proj", "mlp.fc1", "mlp.fc2"))
GATES = tuple(f"{BLOCK}.mlp.{name}" for name in GATED)
AGREES = 1e-5  # relative error up to which block 0 computes what the equations say


def lacks_block(model: MJPVisionTransformer) -> str | None:
    """Why block 0 has not the parts that the equations are of, or None."""
    block: Any = next(iter(getattr(model, "blocks", ())), None)
    layers = [name.removeprefix(f"{BLOCK}.") for name in layers_read(model)]
    lacking = [name for name in (*layers, "norm2") if not _has(block, name)]
    if lacking:
        return f"block 0 has no {', '.join(lacking)}"
    if token_norm(block.norm2) is None:
        kind = type(block.norm2).__name__
        return f"before its two-layer network stands a {kind}, no norm that can be told"
    first = model.get_submodule(first_layers(model)[0])
    if model.family == "timm":
        ended = [one.part for one in run_of(model, model.probe())]  # of an outline, too
        if first in ended and ended.index(first) < ended.index(block.norm2):
            return "block 0's norm2 stands behind its two-layer network"
    return model.other_tokens or None


def layers_read(model: MJPVisionTransformer) -> tuple[str, ...]:
    """The layers of block 0 whose gradients show its tokens."""
    return PROJ, *first_layers(model), FC2


def first_layers(model: MJPVisionTransformer) -> tuple[str, ...]:
    """The first layer of block 0's two-layer network, or two whose outputs gate each other."""
    return GATES if all(_has(model, name) for name in GATES) else (FC1,)


def is_run_again(model: MJPVisionTransformer) -> bool:
    """Whether layers of block 0 run more than once for a picture, or share their weights with
    layers of other blocks, so that a gradient is the sum of several layers'."""
    used = [
        id(parameter)
        for ran in run_of(model, model.probe())
        for parameter in ran.part._parameters.values()
    ]
    weights = [model.get_submodule(name).weight for name in layers_read(model)]
    return any(used.count(id(weight)) > 1 for weight in weights)


def equations_hold(model: MJPVisionTransformer) -> bool:
    """Whether a float64 model's block 0 computes what the equations say, as a random picture shows:
    another scale, norm or position in it gives another output."""
    block, x = model.blocks[0], model.probe("a picture for block 0's equations")
    outputs = list[Tensor]()
    handle = block.register_forward_hook(
        lambda *ran: outputs.append(pictures_first(block, first_tensor(ran[2]))[0])
    )
    with torch.no_grad(), inputs_of(model, [PROJ]) as seen:
        z, empty = (input_of(model, block, shown)[0] for shown in (x, 0 * x))
        model(x)
        handle.remove()
        summed = seen[PROJ][0]
        if z.ndim != 2 or summed.ndim != 2 or len(summed) != len(z):  # a map, or windows of it
            return False
        expected, branch, out = empty.clone(), TwoLayers.of(model), model.get_submodule(PROJ)
        patches, embedding = to_patches(x[0], model.patch_size), Embedding.of(model)
        there = slice(model.prefix, model.prefix + len(patches))
        if embedding.sums:
            offsets = input_of(model, model.norm_pre, 0 * x)[0][there]
            expected[there] = embedding.tokens(patches, offsets)
        else:
            expected[there] += embedding(patches) - embedding(0 * patches)
        r = z + layer_scales(block)[0](out(summed))
        u = branch.norm(z if branch.beside else r)
        after = (r if branch.last is None else u) + branch.scaled(branch.second(branch.hidden(u)))
        after = after if branch.last is None else branch.last(after)
    return not (_differs(expected, z) or _differs(after, outputs[0]))


def _has(module: nn.Module | None, name: str) -> bool:
    try:
        return module is not None and module.get_submodule(name) is not None
    except AttributeError:
        return False


def _differs(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or float((one - other).norm() / other.norm()) > AGREES


def layer_scales(block: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    """What a block multiplies its attention's and its two-layer network's outputs by: nothing in a
    plain ViT, a vector each, or a number, where there is layer scale."""
    if isinstance(block, Named):
        owned = [scale and scale[0]._parameters[scale[1]] for scale in block.scales]
        return [(lambda x: x) if one is None else one.flatten().__mul__ for one in owned]
    parts = [getattr(block, name, nn.Identity()) for name in ("ls1", "ls2")]
    found = [part if isinstance(part, Tensor) else next(part.parameters(), None) for part in parts]
    for names in (("gamma_1", "gamma_2"), ("lambda_1", "lambda_2")):
        if found == [None, None]:
            found = [getattr(block, name, None) for name in names]
    return [(lambda x: x) if gamma is None else gamma.__mul__ for gamma in found]


@dataclass(frozen=True)
class TwoLayers:
    """Block 0's second branch, r + scaled(second(hidden(norm(r)))), in one precision; with a `last`
    norm last(u + scaled(second(hidden(u)))), u = norm(r)."""

    norm: nn.Module
    scaling: TokenNorm  # what the norm computes
    first: nn.Linear
    between: nn.Module  # from the first layer's outputs to the second's inputs
    second: nn.Linear
    scaled: Callable[[Tensor], Tensor]
    parts: int
    """1 where each input of the second layer depends on the output of the first in its place, 2
    where a gate's takes its part as well, and so on; 0 where it is otherwise."""
    last: nn.Module | None = None
    beside: bool = False
    """Whether the norm is given block 0's input, and attention stands beside it."""

    @classmethod
    def of(cls, model: MJPVisionTransformer) -> TwoLayers:
        """The branch of a model's block 0, which is not differentiated."""
        block: Any = copied(model.blocks[0]).requires_grad_(False).eval()
        firsts = [
            block.get_submodule(name.removeprefix(f"{BLOCK}.")) for name in first_layers(model)
        ]
        first, second = _joined(firsts), block.mlp.fc2
        inner = {one: _Share(at, len(firsts)) for at, one in enumerate(firsts)}
        inner |= {second: nn.Identity()}
        between = getattr(block.mlp, "part", block.mlp)  # what runs in a live network
        for holder in between.modules():
            held = holder._modules.items()
            holder._modules.update({name: inner[part] for name, part in held if part in inner})
        parts = first.out_features // second.in_features
        last = getattr(block, "norm3", None)
        scaling = token_norm(block.norm2)
        assert scaling is not None
        like = second.weight
        scaling = TokenNorm(scaling.weight.to(like), scaling.bias.to(like), scaling.centres)
        scaled = layer_scales(block)[1]
        beside = bool(getattr(block, "beside", False))
        branch = cls(block.norm2, scaling, first, between, second, scaled, parts, last, beside)
        random = torch_generator("whether each input depends on its own")
        before, along = torch.randn(2, 1, first.out_features, generator=random).to(first.weight)
        whole = replace(branch, parts=0).moved(before, along)
        agrees = len(along.mT) == parts * second.in_features and not _differs(
            whole, branch.moved(before, along)
        )
        return branch if agrees else replace(branch, parts=0)

    def hidden(self, u: Tensor) -> Tensor:
        """f for inputs u (..., D)."""
        inputs: Tensor = self.between(self.first(u))
        return inputs

    def moved(self, before: Tensor, along: Tensor) -> Tensor:
        """How f (m, k, width) moves as each of the first layer's outputs (m, hidden) moves along
        each of some directions (k, hidden)."""
        if not self.parts:

            def pushed(direction: Tensor) -> Tensor:
                moved: Tensor = jvp(self.between, (before,), (direction.expand_as(before),))[1]
                return moved

            return vmap(pushed)(along).transpose(0, 1)
        with torch.enable_grad():  # of the sum: each of f depends on its own parts alone
            inputs = before.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(self.between(inputs).sum(), inputs)
        products = slopes.unsqueeze(1) * along
        return products.unflatten(2, (self.parts, -1)).sum(2) if self.parts > 1 else products

    def back(self, u: Tensor, upstream: Tensor) -> Tensor:
        """d (m, hidden) at the first layer's output for inputs u (m, D) and gradients g (m, D) of
        the branch's output."""
        pulled: Tensor = vjp(self.between, self.first(u))[1](
            self.scaled(upstream) @ self.second.weight
        )[0]
        return pulled


class _Share(nn.Module):
    """One of so many equal parts of what it is given."""

    def __init__(self, at: int, count: int) -> None:
        super().__init__()
        self.at, self.count = at, count

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.chunk(self.count, -1)[self.at]


def _joined(layers: Sequence[Any]) -> nn.Linear:
    """Layers of the same input as one, of all their outputs."""
    if len(layers) == 1:
        whole: nn.Linear = layers[0]
        return whole
    weight = torch.cat([layer.weight for layer in layers])
    whole = nn.Linear(weight.shape[1], len(weight), device="meta")
    zeros = [torch.zeros_like(layer.weight[:, 0]) for layer in layers]
    biases = [
        z if layer.bias is None else layer.bias for z, layer in zip(zeros, layers, strict=True)
    ]
    whole.weight, whole.bias = nn.Parameter(weight, False), nn.Parameter(torch.cat(biases), False)
    return whole


SCALES = torch.logspace(-0.2, 0.2, 1200, dtype=torch.float64)  # of a patch's contrast, if it is off
PIXELS = 256  # of a patch that are looked at
WHOLE = 0.8  # the mean length of pixels' phases from which they are whole grey levels apart


@dataclass(frozen=True)
class Embedding:
    """A network's patch embedding, of flattened patches."""

    weight: Tensor  # W (D, p)
    bias: Tensor  # b (D,)
    before: nn.LayerNorm | None
    after: nn.Module | None  # a LayerNorm, or an RMSNorm, whose mean is 0
    sums: bool = False  # whether `after` is given the sum with positions

    @classmethod
    def of(cls, model: MJPVisionTransformer) -> Embedding:
        """The embedding of a model, which is not differentiated."""
        projection = model.patch_embed.proj
        weight, bias = projection.weight.detach().flatten(1), model.patch_bias.detach()
        before, after = model.patch_norms
        if before is not None and before.elementwise_affine:  # in the order of the layer's inputs
            place, before = projection.order.argsort(), copied(before)
            for parameter in before.parameters():
                parameter.data = parameter.data[place]
        first = getattr(model, "norm_pre", None)
        if isinstance(first, nn.Identity | None):
            return cls(weight, bias, before, after)
        return cls(weight, bias, before, first, sums=True)

    @torch.no_grad()
    def inputs(self, patches: Tensor) -> Tensor:
        """n of patches (..., p)."""
        return patches if self.before is None else self.before(patches)

    @torch.no_grad()
    def __call__(self, patches: Tensor) -> Tensor:
        """What patches (..., p) are embedded as (..., D), without positions."""
        embedded = self.inputs(patches) @ self.weight.mT + self.bias
        return embedded if self.after is None else self.after(embedded)

    @torch.no_grad()
    def tokens(self, inputs: Tensor, offsets: Tensor) -> Tensor:
        """Block 0's inputs (N, D) of inputs n (N, p), with these `offsets` of their places."""
        if self.after is None:
            return inputs @ self.weight.mT + offsets
        if self.sums:
            summed: Tensor = self.after(inputs @ self.weight.mT + offsets)
            return summed
        embedded: Tensor = self.after(inputs @ self.weight.mT + self.bias)
        return embedded - self.constant + offsets

    @property
    def constant(self) -> Tensor:
        """(D,) what is added to every embedding: b, or the last norm's bias."""
        return self.bias if self._last is None else self._last.bias

    @cached_property
    def _last(self) -> TokenNorm | None:
        """What the last norm computes."""
        found = None if self.after is None else token_norm(self.after)
        like = self.bias
        return found and TokenNorm(found.weight.to(like), found.bias.to(like), found.centres)

    # the equations of one token, for patches n = anchor + y basis ---------------------------------

    def scaled(self, vectors: Tensor) -> Tensor:
        """Vectors (..., D) over the last norm's weight."""
        return vectors if self._last is None else vectors / self._last.weight

    def reduced(self, vectors: Tensor) -> Tensor:
        """Known vectors (..., D) of a token's equations, less what no equation tells."""
        if self.after is None:
            return vectors - vectors.mean(-1, keepdim=True)
        return self.scaled(vectors)

    def moves(self, basis: Tensor, anchor: Tensor, offsets: Tensor | None = None) -> Tensor:
        """(k, D) what the equations' unknowns move, but for the length s: first those of y.

        offsets  (D,) of a token's place; None: what of it all places have in common
        """
        moves = basis @ self.weight.mT
        if self.after is None:
            return self.reduced(moves)
        ones = torch.ones_like(self.bias)
        others = [self.scaled(ones), ones]
        if not self.sums:
            others = [self.weight @ anchor + self.bias, *others]
        elif offsets is not None:
            others = [self.scattered(anchor, offsets), *others]
        return torch.cat((moves, torch.stack(others)))

    def scattered(self, anchor: Tensor, offsets: Tensor) -> Tensor:
        """(..., D) what 1 / sigma multiplies at places with these offsets, where a norm is given
        the sum with positions."""
        return anchor @ self.weight.mT + offsets

    def known(self, anchor: Tensor, offsets: Tensor, added: Tensor) -> Tensor:
        """The known vectors (..., D) of equations: of places, of what attention added, or both."""
        if self.sums:
            return self.reduced(self.constant + added)
        fixed = anchor @ self.weight.mT if self.after is None else 0
        return self.reduced(offsets + fixed + added)

    def patches(self, unknowns: Tensor, basis: Tensor, anchor: Tensor) -> Tensor:
        """The patches n (m, p) with these unknowns (m, k)."""
        if self.after is None:
            return anchor + unknowns @ basis
        count = len(basis)
        return anchor + unknowns[:, :count] / unknowns[:, count : count + 1] @ basis

    # from normalised patches to pixels ------------------------------------------------------------

    def contrasts(self, inputs: Tensor) -> Tensor:
        """Pixels (N, p), less the mean of each patch, with these inputs n of the linear layer."""
        if self.before is None:
            return inputs
        norm = self.before
        if norm.weight is not None:
            inputs = inputs / norm.weight.detach()
            inputs = inputs if norm.bias is None else inputs - norm.bias / norm.weight
        inputs = inputs - inputs.mean(-1, keepdim=True)
        variance = inputs.square().mean(-1, keepdim=True)
        most = 1 / (1 + norm.eps)  # of pixels with a variance of 1
        variance = norm.eps / (1 - variance.clamp(max=most))
        return inputs * variance.sqrt()

    def pixels(self, inputs: Tensor, known: Tensor, energy: FieldEnergy, pixels: Pixels) -> Tensor:
        """The most probable patches (N, p) of a picture with these inputs n, of which some (N,) are
        known: each as bright as makes borders' steps fewest, and no pixel less than black or more
        than white, as far as the patch's contrast leaves room."""
        if self.before is None:
            return inputs
        contrasts = _scaled_to_whole(self.contrasts(inputs), pixels, energy.patch_size)
        contrasts = torch.where(known[:, None], contrasts, 0 * contrasts)
        ones = torch.full_like(inputs[:1], inputs.shape[1] ** -0.5)
        levels = Knowledge(contrasts, ones, ~known)
        patches = complete(levels, energy)
        sparse, _ = fewest_steps(levels, patches, energy.patch_size, pixels)
        patches = normalised(sparse, pixels, energy.patch_size)
        scale, zero = normalisation(pixels, energy.patch_size, patches)
        least = (-zero / scale - patches).amax(1, keepdim=True)
        most = ((1 - zero) / scale - patches).amin(1, keepdim=True)
        room = (0 * least).clamp(least, most)
        patches = patches + torch.where(least <= most, room, (least + most) / 2)
        if bool(known.all()):
            return patches
        nothing = Knowledge(0 * patches, torch.eye(len(ones.mT)).to(patches), ~known)
        return complete(nothing, energy, known, patches)


def _scaled_to_whole(contrasts: Tensor, pixels: Pixels, patch_size: int) -> Tensor:
    """Contrasts (N, p), each times the factor by which its pixels are whole grey levels apart, if
    there is one."""
    levels = 255 * contrasts * normalisation(pixels, patch_size, contrasts)[0]
    channels = levels.unflatten(1, (-1, patch_size**2))
    every = max(1, levels.shape[1] // PIXELS)
    factors = levels.new_ones(len(levels), 1)
    for index, patch in enumerate(channels):
        turns = 2 * math.pi * SCALES.to(patch)[:, None, None] * patch[:, ::every]
        lengths = torch.polar(torch.ones_like(turns), turns).mean(2).abs().mean(1)
        if float(lengths.max()) < WHOLE:
            continue
        grey = SCALES[lengths.argmax()].to(patch) * patch
        phases = torch.polar(torch.ones_like(grey), 2 * math.pi * grey).mean(1).angle()
        offsets = phases[:, None] / (2 * math.pi)
        whole = (grey - offsets).round()
        whole, flat = whole - whole.mean(1, keepdim=True), patch - patch.mean(1, keepdim=True)
        if bool(whole.any()):
            factors[index] = (whole * flat).sum() / flat.square().sum()
    return contrasts * factors
