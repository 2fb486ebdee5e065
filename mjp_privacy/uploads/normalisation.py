"""Whether a client normalised its pictures as is declared, seen from the pixels that it fed.

Undone with the right mean and std, a decoded picture has whole grey levels within [0, 1]; with
others it has not:

    declared_wrongly(fed, (0.5,) * 3, (0.5,) * 3)   a sentence; "" where nothing is wrong

A picture cannot show everything: red and blue swapped under equal mean and std is a picture, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attacks.equations.patch_system import FEW, ROUNDED
from mjp_privacy.models.zoo import IMAGENET_MEAN, IMAGENET_STD

RANDOM = 0.2  # mean distance to a whole grey level, in levels; .25 of numbers that are no levels
LEVELS = 0.1  # and below it pixels are 8-bit levels
ON_A_GRID = 0.9  # of `levels_apart`, from which pixels are 8-bit levels
FACTORS, PIXELS_TRIED = (0.1, 1000.0), 200
"""Of contrast that are looked through, and on how many pixels. Darkest and lightest pixel of a
channel are 255 levels apart at most: what would bring them further apart explains nothing."""
NEARLY = 0.6  # of `levels_apart`, from which a factor is looked at closely

OTHERWISE = (
    "the client normalised otherwise, or changed pixels afterwards (padding, erasing, noise)"
)
SCALED_APART = (
    "tensors' gradients were scaled by themselves (clipped, or a learning rate, for each)"
)
PARTS = (1, 2, 3, 4)
"""Into which means divide levels: of two pictures, three channels, four pixels."""

Floats = tuple[float, float]
Channels = tuple[float, float, float]
Named = tuple[str, tuple[float, ...], tuple[float, ...]]
"""A normalisation's name, mean and std."""
COMMON: Mapping[str, tuple[Channels, Channels]] = {
    "ImageNet's": (IMAGENET_MEAN, IMAGENET_STD),
    "one half": ((0.5,) * 3, (0.5,) * 3),
    "none": ((0.0,) * 3, (1.0,) * 3),
    "CLIP's": (
        (0.48145466, 0.4578275, 0.40821073),
        (0.26862954, 0.26130258, 0.27577711),
    ),
    "CIFAR-10's": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
"""Normalisations that clients use, by name."""
OF_GREY: Mapping[str, tuple[tuple[float], tuple[float]]] = {
    "one half": ((0.5,), (0.5,)),
    "none": ((0.0,), (1.0,)),
    "MNIST's": ((0.1307,), (0.3081,)),
    "Fashion-MNIST's": ((0.2860,), (0.3530,)),
}
"""The same of grey pictures."""


def outside_and_off(
    fed: Tensor, mean: Sequence[float], std: Sequence[float], parts: int = 1
) -> Floats:
    """How a picture (C, H, W), normalised, looks under one normalisation: the share of its pixels
    that leave [0, 1], and their mean distance to a whole 8-bit level, or to one of so many parts
    of it, in these parts. NaN: a pixel is not known."""
    scale = torch.tensor([mean, std], dtype=torch.float64).view(2, -1, 1, 1)
    pixels = fed.double().cpu() * scale[1] + scale[0]
    known = pixels[~pixels.isnan()]
    outside = ((known < -ROUNDED) | (known > 1 + ROUNDED)).double().mean()
    levels = known * 255 * parts
    return float(outside), float((levels - levels.round()).abs().mean())


def declared_wrongly(fed: Tensor, mean: Sequence[float], std: Sequence[float]) -> str:
    """What speaks against the declared normalisation, and which one fits; "" if nothing does."""
    outside, off = outside_and_off(fed, mean, std)
    candidates = _candidates(mean, std, as_levels=outside > FEW)
    strange = [f"{100 * outside:.1f} % of its pixels leave [0, 1]"] if outside > FEW else []
    strange += ["its pixels are no 8-bit levels"] if off > RANDOM else []
    if not strange:
        return ""
    on_a_grid = sorted(
        tuple(s)
        for _, _, s in candidates
        if float(_ranges(fed, s).max()) <= 1 + ROUNDED and levels_apart(fed, s) > ON_A_GRID
    )
    told, fitting = candidates[0], list[tuple[float, Named]]()
    for parts in PARTS[:1] if on_a_grid else PARTS:  # the coarsest that fits, unless as declared
        looks = [(outside_and_off(fed, *each[1:], parts), each) for each in candidates]
        fits = {each: away for (out, away), each in looks if out <= FEW and away < LEVELS}
        if fits:
            fitting = [] if told in fits else [(away, each) for each, away in fits.items()]
            break
    if fitting:
        _, (name, *both) = min(fitting)
        levels = "8-bit levels" if parts == 1 else f"multiples of 1/{parts} level"
        found = f"with {name} (mean {_numbers(both[0])}, std {_numbers(both[1])}) they are {levels}"
        found += " within [0, 1]"
    elif float(_ranges(fed, std).max()) < 1 / 255:
        found = "its one colour does not tell which would make it one"
    elif on_a_grid and off > RANDOM:
        found = f"with std {_numbers(on_a_grid[0])} they are levels, whatever the mean"
    elif (scale := scale_on_a_grid(fed, std)) is not None:
        found = (
            f"with {scale:.4g} times their contrast they are 8-bit levels, as where {SCALED_APART}"
        )
    elif outside > FEW:
        found = "no usual one fits, or its pixels or gradients were altered"
    else:
        return ""  # resized or augmented pixels are no levels either
    return (
        f"with the declared mean {_numbers(mean)} and std {_numbers(std)} {' and '.join(strange)}; "
        f"{found}: {OTHERWISE}"
    )


def _ranges(fed: Tensor, std: Sequence[float]) -> Tensor:
    """How far apart the darkest and the lightest known pixel of each channel (C, H, W) are."""
    pixels = fed.double().cpu().flatten(1)
    dark, light = (pixels.where(~pixels.isnan(), end) for end in (torch.inf, -torch.inf))
    return (light.amax(1) - dark.amin(1)) * torch.tensor(std, dtype=torch.float64)


def levels_apart(fed: Tensor, std: Sequence[float]) -> float:
    """How far pixels (C, H, W) lie on a grid of 8-bit levels under this std, whatever their mean:
    1 for all on it, near 0 for pixels that are no levels."""
    scale = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
    turns = torch.exp(2j * math.pi * 255 * scale * fed.double().cpu())
    return float(torch.view_as_real(turns).flatten(1, 2).nanmean(1).norm(dim=1).min())


def scale_on_a_grid(fed: Tensor, std: Sequence[float]) -> float | None:
    """The least factor by which a picture's contrast has to be multiplied for its pixels to be
    8-bit levels; None where none of `FACTORS` does it.

    scale_on_a_grid(1.25 * (levels / 255 - 0.5) / 0.5, (0.5, 0.5, 0.5))   # 0.8
    """
    known = fed.double().cpu()[:, ~fed.isnan().any(0).cpu()]
    if not known.numel():
        return None
    apart = max(len(known.mT) // PIXELS_TRIED, 1)
    levels = known[:, ::apart] * torch.tensor(std, dtype=torch.float64)[:, None] * 255

    def on_grid(factors: Tensor) -> Tensor:
        turns = torch.exp(2j * math.pi * factors[:, None, None] * levels)
        return turns.mean(2).abs().amin(1)

    least, most = FACTORS
    most = min(most, (1 + ROUNDED) / max(float(_ranges(fed, std).max()), 1 / 255))
    if most <= least:
        return None
    spread = float((levels - levels.mean(1, keepdim=True)).abs().max())
    step = 1 / (3 * most * max(spread, 1.0))  # a third of a level
    count = math.ceil(math.log(most / least) / step)
    every = torch.logspace(math.log10(least), math.log10(most), count, dtype=torch.float64)
    for factors in every.split(256):
        for factor in factors[on_grid(factors) > NEARLY]:
            near = factor * (step * torch.linspace(-5, 5, 201, dtype=torch.float64)).exp()
            best = on_grid(near).max(0)
            if float(best.values) > ON_A_GRID:
                return float(near[best.indices])
    return None


def _candidates(mean: Sequence[float], std: Sequence[float], *, as_levels: bool) -> list[Named]:
    """The declared normalisation and the common ones, in both orders of the channels.

    as_levels  with pixels fed as 0…255, which leave [0, 1] under any other; but under this one all
               that is fed otherwise is nearly black
    """
    told: list[Named] = [
        ("those declared", tuple(mean), tuple(std)),
        ("the declared mean alone", tuple(mean), (1.0,) * len(std)),
        ("the declared std alone", (0.0,) * len(mean), tuple(std)),
        *((name, *both) for name, both in (COMMON if len(mean) == 3 else OF_GREY).items()),
        *[("pixels from 0 to 255", (0.0,) * len(mean), (1 / 255,) * len(std))] * as_levels,
    ]
    known = [each[1:] for each in told]
    turned = [(f"{name} in the other order of channels", m[::-1], s[::-1]) for name, m, s in told]
    return [*told, *(each for each in turned if each[1:] not in known)]


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in dict.fromkeys(values))
