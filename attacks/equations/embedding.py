r"""How a network embeds one patch, and what a token's equations say of it.

A plain ViT embeds a patch as z = W x + b + e. Networks that normalise patches first, embedded ones
afterwards, or both (vit-pytorch's), compute

    n = before(x),    y = W n + b,    z = after(y) + e,    after(y) = w (y - mean) / sigma + c.

With mean and sigma unknown, a token z + added = s u + (multiple of ones) gives D equations,

    s u / w - (e + c + added) / w = (W n + b) / sigma - mean / sigma - (multiple of 1 / w),

linear in n / sigma, 1 / sigma, s and the two multiples. Where positions are added before the last
norm (CLIP's ln_pre), y = W n + b + e, and 1 / sigma multiplies e as well.

Of x, n tells all but the mean: its variance v is told by the norm's eps, for n has the variance
v / (v + eps), and then by 8-bit pixels, whose differences are whole. The mean is guessed, by
borders and a prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from attacks.equations.completion import FieldEnergy, complete, fewest_steps
from attacks.equations.patch_system import normalisation, normalised
from attacks.equations.span import Knowledge
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.vit import TokenNorm, copied, token_norm

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

    @property
    def is_plain(self) -> bool:
        """Whether no norm stands before or behind the linear layer."""
        return self.before is None and self.after is None

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
        steps = fewest_steps(levels, patches, energy.patch_size, pixels)
        patches = normalised(steps.patches, pixels, energy.patch_size)
        black, white = (torch.full_like(patches, level) for level in (0.0, 1.0))
        least = (normalised(black, pixels, energy.patch_size) - patches).amax(1, keepdim=True)
        most = (normalised(white, pixels, energy.patch_size) - patches).amin(1, keepdim=True)
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
