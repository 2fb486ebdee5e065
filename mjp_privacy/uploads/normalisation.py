"""Whether a client normalised its pictures as is declared, seen from the pictures themselves.

Where an upload's equations determine every patch, they give what the client *fed*: its pixels after
normalisation. Undone with the right mean and std, a decoded picture has whole grey levels within
[0, 1]; with others it has not.

    declared_wrongly(fed, (0.5,) * 3, (0.5,) * 3)   a sentence; "" where nothing is wrong

A picture cannot show everything: red and blue swapped under equal mean and std is a picture, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attacks.equations.names import PATCH, TABLE
from attacks.equations.patch_system import patch_system
from attacks.equations.requirements import lacks_gradients
from attacks.equations.span import combine, upload_span
from mjp_privacy.interfaces import AttackerView, ClientUpdate
from mjp_privacy.models.jigsaw import to_images
from mjp_privacy.models.zoo import IMAGENET_MEAN, IMAGENET_STD

OUTSIDE = 0.02  # how far pixels may leave [0, 1] by rounding under the right normalisation
RANDOM = 0.2  # mean distance to a whole grey level, in levels; .25 of numbers that are no levels
LEVELS = 0.1  # and below it pixels are 8-bit levels
FEW = 1e-3  # share of pixels outside [0, 1] that says nothing

Channels = tuple[float, float, float]
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


class Fit(NamedTuple):
    """How a picture looks under one normalisation."""

    outside: float  # share of pixels that leave [0, 1]
    off: float  # mean distance to a whole 8-bit level, in levels

    @classmethod
    def of(cls, fed: Tensor, mean: Sequence[float], std: Sequence[float]) -> Fit:
        """fed: (C, S, S), normalised"""
        scale = torch.tensor([mean, std], dtype=torch.float64).view(2, -1, 1, 1)
        pixels = fed.double().cpu() * scale[1] + scale[0]
        outside = ((pixels < -OUTSIDE) | (pixels > 1 + OUTSIDE)).double().mean()
        levels = pixels * 255
        return cls(float(outside), float((levels - levels.round()).abs().mean()))


def fed_pixels(view: AttackerView, index: int = 0) -> Tensor | None:
    """The picture (C, S, S) at this index as the client fed it, normalised and not clipped, if its
    uploads determine every patch; else None."""
    if lacks_gradients(view, TABLE, PATCH) or any(u.batch > 1 or u.steps > 1 for u in view.updates):
        return None
    if view.model.patch_embed.num_patches > view.model.embed_dim or any(map(_noisy, view.updates)):
        return None
    spans = [upload_span(patch_system(view, update), index) for update in view.updates]
    combined = combine(spans)
    if len(combined.basis):
        return None
    return to_images(combined.known, view.model.patch_size, len(view.pixels.mean))


def _noisy(update: ClientUpdate) -> bool:
    """Whether the gradients carry an error that would move the pixels: noise, rounding, halves."""
    errors = (of[n] for of in (update.noise, update.rounding) for n in (TABLE, PATCH) if n in of)
    return update.autocast != "none" or any(bool((error > 0).any()) for error in errors)


def declared_wrongly(fed: Tensor, mean: Sequence[float], std: Sequence[float]) -> str:
    """What speaks against the declared normalisation, and which one fits; "" if nothing does."""
    declared = Fit.of(fed, mean, std)
    known = f"mean {_numbers(mean)} and std {_numbers(std)}"
    strange = []
    if declared.outside > FEW:
        strange.append(f"{100 * declared.outside:.1f} % of its pixels leave [0, 1]")
    if declared.off > RANDOM:
        strange.append("its pixels are no 8-bit levels")
    if not strange:
        return ""
    fitting = [
        (fit.off, f"{name} (mean {_numbers(m)}, std {_numbers(s)})")
        for name, m, s in _candidates(mean, std)
        if (fit := Fit.of(fed, m, s)).outside <= FEW and fit.off < LEVELS
    ]
    if fitting:
        return (
            f"with the declared {known} {' and '.join(strange)}; with {min(fitting)[1]} they are "
            "8-bit levels within [0, 1]: the client normalised with these. Give them; until then "
            "its picture is known up to colours and contrast alone"
        )
    if declared.outside > FEW:
        return (
            f"with the declared {known} {' and '.join(strange)}: the client normalised with "
            "others, or its pixels or gradients were altered"
        )
    return ""  # resized or augmented pixels are no levels either


def _candidates(
    mean: Sequence[float], std: Sequence[float]
) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    """The declared normalisation and the common ones, in both orders of the channels."""
    every = {"those declared": (tuple(mean), tuple(std)), **COMMON}
    found: list[tuple[str, Sequence[float], Sequence[float]]] = []
    for name, (m, s) in every.items():
        if len(m) != len(mean):
            continue
        found.append((name, m, s))
        if (m[::-1], s[::-1]) != (m, s):
            found.append((f"{name} in the other order of channels", m[::-1], s[::-1]))
    return found


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in dict.fromkeys(values))
