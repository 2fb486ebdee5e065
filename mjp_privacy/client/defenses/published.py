r"""The published defences: some add noise, the others send fewer bits. None of the latter is
random, and zero entries stay zero.

`gaussian_noise s` adds, on every entry, noise of s times the root mean square of the whole upload's
nonzero entries. `dp_sgd sigma` (Abadi et al. 2016) makes of the examples' gradients g_b, clipped
over all parameters together,

    (1/B) ( sum_b g_b min(1, C / ||g_b||) + N(0, sigma^2 C^2 I) ).
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from mjp_privacy.client.defenses.disturbance import (
    Disturbed,
    Draws,
    dropped_error,
    per_step,
    smallest_kept,
    squared_norm,
)
from mjp_privacy.core.schema import NotNegative, Positive, schema
from mjp_privacy.interfaces import Grads

# noise --------------------------------------------------------------------------------------------


@schema
class GaussianNoise:
    """Adds Gaussian noise; the number is its size relative to the entries'.

    `std`: relative to the root mean square of the whole upload's nonzero entries.
    """

    std: NotNegative
    name: ClassVar[str] = "gaussian_noise"
    main: ClassVar[str | None] = "std"

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        scale = self.std * (squared_norm(sent) / _nonzero(sent)).sqrt()
        noisy = {
            name: g + per_step(scale, g) * draws.normal(name, g.shape[1:]).to(g)
            for name, g in sent.items()
        }
        return Disturbed(noisy, dict.fromkeys(noisy, self.public_deviation(noisy)))

    def public_deviation(self, noisy: Grads) -> Tensor:
        """The noise's size (n,) as anybody can estimate it from the noisy upload.

        The rms of what is sent is sqrt(1 + std^2) times that of the gradient, apart from the
        unknown number of zero entries.
        """
        mean = squared_norm(noisy) / sum(g[0].numel() for g in noisy.values())
        return self.std * (mean / (1 + self.std**2)).sqrt()


def _nonzero(sent: Grads) -> Tensor:
    """(n,) number of entries that are not zero, at least 1.

    What may be a rounding error counts as zero, since such errors depend on the rest of the block.
    """
    largest = torch.stack([g.flatten(1).abs().amax(1) for g in sent.values()]).amax(0)
    zero = (largest * torch.finfo(largest.dtype).eps).unsqueeze(1)
    counts = [(g.flatten(1).abs() > zero).sum(1) for g in sent.values()]
    return torch.stack(counts).sum(0).clamp(min=1)


@schema
class DpSgd:
    """Clips each gradient, then adds noise; the number is noise over clip.

    DP-SGD. `noise`: the multiplier sigma; `clip`: the largest norm C of an example's gradient.
    """

    noise: NotNegative
    clip: Positive = 1.0
    name: ClassVar[str] = "dp_sgd"
    main: ClassVar[str | None] = "noise"

    def step_gradient(self, examples: Grads, draws: Draws) -> dict[str, Tensor]:
        """Clip, average and add noise: (n, B, *shape) of every parameter -> (n, *shape)."""
        squares = [g.double().flatten(2).square().sum(2) for g in examples.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        factors = (self.clip / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp(max=1)
        level = self.deviation(norms.shape[1])
        gradients = {}
        for name, g in examples.items():
            mean = (g * factors.to(g).view(*factors.shape, *[1] * (g.ndim - 2))).mean(1)
            noisy = mean + level * draws.normal(name, g.shape[2:]).to(g) if level else mean
            gradients[name] = noisy
        return gradients

    def deviation(self, batch: int) -> float:
        """Standard deviation of the noise on an entry of the step's gradient: sigma C / B."""
        return self.noise * self.clip / batch


# fewer bits ---------------------------------------------------------------------------------------

KeptShare = Annotated[float, Field(strict=True, gt=0, le=1)]
Percent = Annotated[float, Field(strict=True, ge=0, le=100)]

UNIFORM = 1 / math.sqrt(12)  # standard deviation of an error that is uniform over one step
LARGEST, MANTISSA, SMALLEST = 65504.0, 10, -24  # float16: top, mantissa bits, least exponent
HALF_NORMAL = math.sqrt(math.pi / 2 - 1)  # standard deviation of |x| over its mean, x normal
LEVELS = 127  # int8's levels on either side of zero


def largest(flat: Tensor, share: float) -> Tensor:
    """The numbers (n, k) with zero in place of all but the largest magnitudes; one at least stays.

    largest(torch.tensor([[1.0, -3.0]]), 0.5) is [[0, -3]].
    """
    kept = max(1, round(share * flat.shape[1]))
    places = flat.abs().topk(kept, dim=1, sorted=False).indices
    return torch.zeros_like(flat).scatter(1, places, flat.gather(1, places))


@schema
class TopK:
    """Sends only the largest entries; the number is the share that is kept.

    `share`: counted over the whole upload, by magnitude; all other entries become zero.
    """

    share: KeptShare
    name: ClassVar[str] = "top_k"
    main: ClassVar[str | None] = "share"

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        sparse = largest(torch.cat([g.flatten(1) for g in sent.values()], 1), self.share)
        parts = sparse.split([g[0].numel() for g in sent.values()], 1)
        shaped = {
            name: part.unflatten(1, g.shape[1:])
            for (name, g), part in zip(sent.items(), parts, strict=True)
        }
        threshold = smallest_kept(sparse)
        return Disturbed(
            shaped, {}, {name: dropped_error(g, threshold) for name, g in shaped.items()}
        )


@schema
class Float16:
    """Sends numbers in half precision (16 bits); takes no number.

    What is too large for it becomes its largest number, 65504.
    """

    name: ClassVar[str] = "float16"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        halves = {name: g.clamp(-LARGEST, LARGEST).half().to(g.dtype) for name, g in sent.items()}
        rounding = {}
        for name, half in halves.items():  # uniform over the distance to the next number
            flat = half.double().flatten(1)
            step = (torch.frexp(flat.abs()).exponent - 1 - MANTISSA).clamp(min=SMALLEST)
            step = torch.where(flat == 0, SMALLEST, step)
            rounding[name] = UNIFORM * (4.0 ** step.double()).mean(1).sqrt()
        return Disturbed(halves, {}, rounding)


@schema
class Int8:
    """Rounds each tensor to 255 even levels (8 bits); takes no number.

    A level is the tensor's largest magnitude over 127; entries go to the nearest level.
    """

    name: ClassVar[str] = "int8"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        """Round every entry to the levels of its tensor; an all-zero tensor stays zero."""
        steps = {name: g.flatten(1).abs().amax(1) / LEVELS for name, g in sent.items()}
        rounded = {}
        for name, g in sent.items():
            step = per_step(steps[name], g)
            rounded[name] = torch.where(step > 0, (g / step).round() * step, 0.0).nan_to_num(0.0)
        return Disturbed(
            rounded, {}, {name: UNIFORM * step.double() for name, step in steps.items()}
        )


@schema
class Sign:
    """Sends each entry's sign times its tensor's mean size; takes no number."""

    name: ClassVar[str] = "sign"
    main: ClassVar[str | None] = None

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        mean = {name: g.flatten(1).abs().mean(1) for name, g in sent.items()}
        signs = {name: g.sign() * per_step(mean[name], g) for name, g in sent.items()}
        return Disturbed(signs, {}, {name: HALF_NORMAL * m.double() for name, m in mean.items()})


@schema
class Prune:
    """Sends only each tensor's largest entries; the number is the share that is kept.

    `share`: counted in every tensor by itself, at least one entry; `top_k` counts over the whole
    upload, so that tensors with small entries lose all of theirs.
    """

    share: KeptShare
    name: ClassVar[str] = "prune"
    main: ClassVar[str | None] = "share"

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        """Prune every tensor of each step; the error lies below the smallest entry kept."""
        pruned = {n: largest(g.flatten(1), self.share).view_as(g) for n, g in sent.items()}
        errors = {n: dropped_error(g, smallest_kept(g.flatten(1))) for n, g in pruned.items()}
        return Disturbed(pruned, rounding=errors)


FEW_CUT = 1e-3
"""The share of a tensor's entries that may be cut before its error counts as not known.

On gradients of trained ViTs (`cifar_vit`, `cifar_vit_mjp`) the error is above 1.4 times the
declared one in 3 % of the tensors of which nothing was cut, in 6 % of those with less than this
share, and in 12 to 42 % of those with more, up to 50 times.
"""


@schema
class PercentilePrivacy:
    """Zeroes small entries and cuts large ones, as NVFlare does; the number is the percentile.

    `percentile`: of all magnitudes; entries below it become zero. `gamma`: the rest is cut to
    [-gamma, gamma]. Both hold for an update divided by its number of local steps.
    """

    percentile: Percent = 10.0
    gamma: Positive = 0.01
    name: ClassVar[str] = "percentile_privacy"
    main: ClassVar[str | None] = "percentile"

    def apply(self, sent: Grads, draws: Draws) -> Disturbed:
        """Filter every tensor; a parameter that is a single number stays as it is."""
        arrays = {name: g for name, g in sent.items() if g.ndim > 1}
        if not arrays:
            return Disturbed(dict(sent))
        gamma = self.gamma * draws.steps  # in place of dividing by the steps and multiplying back
        flat = torch.cat([g.flatten(1) for g in arrays.values()], 1)
        cutoff = percentile(flat.abs(), self.percentile)
        filtered = {
            name: torch.where(g.abs() < per_step(cutoff, g), 0.0, g).clamp(-gamma, gamma)
            for name, g in arrays.items()
        }
        threshold = smallest_kept(torch.cat([g.flatten(1) for g in filtered.values()], 1))
        rounding, unknown = {}, {}
        for name, g in filtered.items():
            tail, unknown[name] = cut_error(g.flatten(1).abs(), gamma, threshold)
            rounding[name] = (dropped_error(g, threshold).square() + tail.square()).sqrt()
        return Disturbed({**sent, **filtered}, rounding=rounding, unknown=unknown)


def cut_error(sizes: Tensor, gamma: float, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The deviation (n,) of what was cut off at gamma, and whether the upload does not tell it.

    What lies above gamma is taken to fall exponentially, at the rate of the sizes (n, k) below it
    that can be seen: of those in [start, gamma) as many as still are at gamma. That is a guess, and
    of the gradients of trained networks too small a one: where more than a few entries were cut,
    the upload does not tell how far they went. Where the tensor has nothing below gamma, or the
    whole upload shows no number below it, all that is known is that something was cut.

    threshold (n,): the smallest magnitude in the whole upload that is not zero
    """
    edge = torch.tensor(gamma, dtype=sizes.dtype, device=sizes.device)
    number, half = (sizes >= edge).sum(1).double(), threshold.double().clamp(min=gamma / 2)
    near = (sizes >= half.unsqueeze(1)).sum(1).double() - number
    start = torch.where(near > 0, half, 0.0)
    below = torch.where(near > 0, near, sizes.shape[1] - number)
    seen = (below > 0) & (threshold < edge)
    rate = ((below + number + 0.5) / (number + 0.5)).log()
    scale = torch.where(seen, (gamma - start) / rate, gamma)
    deviation = scale * (2 * number / sizes.shape[1]).sqrt()
    unknown = (number > FEW_CUT * sizes.shape[1]) | ((number > 0) & ~seen)
    return torch.where(number > 0, deviation, 0.0), unknown


def percentile(sizes: Tensor, share: float) -> Tensor:
    """(n,) the percentile of (n, k), linear between neighbours as NumPy's: share 50 is the median.

    torch.quantile refuses tensors as large as an upload.
    """
    place = share / 100 * (sizes.shape[1] - 1)
    low = math.floor(place)
    first = sizes.kthvalue(low + 1, dim=1).values
    second = sizes.kthvalue(min(low + 2, sizes.shape[1]), dim=1).values
    return first + (place - low) * (second - first)
