"""LPIPS v0.1 with AlexNet (Zhang et al. 2018), without a download.

Within 5e-7 of the `lpips` package, which takes seconds to import and is the tests' yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.alexnet import SMALLEST, alexnet_layers, lpips_heads
from mjp_privacy.metrics.contract import Prepared

EPS = 1e-10  # as in the lpips package


@dataclass(frozen=True)
class Lpips:
    """LPIPS as a measure: weighted squared distance of unit-length features, averaged over space,
    summed over layers. Float32, >= 0.

    Images have 3 channels (RGB) or 1 (grey).
    """

    precision: ClassVar[torch.dtype] = torch.float32

    def prepare(self, references: Tensor) -> Prepared:
        """The references' features, (m, places, channels) for each layer."""
        _check_shape(references)
        return tuple(unit_layers(references))

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """(m, C, H, W) in [0, 1] and the features of the references -> (m,)."""
        total = reconstructions.new_zeros(len(reconstructions))
        layers = zip(unit_layers(reconstructions), prepared, lpips_heads(), strict=True)
        for features, known, head in layers:
            squares = features.sub_(known).square_()
            total += (squares @ head.flatten().to(squares)).mean(1)
        return total


def unit_layers(images: Tensor) -> Iterator[Tensor]:
    """AlexNet's five layers (m, places, channels), at every place divided by their length."""
    for layer in alexnet_layers(images):
        features = layer.permute(0, 2, 3, 1).flatten(1, 2)
        yield features / (torch.linalg.vector_norm(features, dim=-1, keepdim=True) + EPS)


def _check_shape(images: Tensor) -> None:
    channels, height, width = images.shape[1:]
    if min(height, width) < SMALLEST:
        raise UserError(
            f"LPIPS expected images of at least {SMALLEST}×{SMALLEST} pixels, the smallest that "
            f"AlexNet can take; these are {height}×{width}. Leave lpips out of the metrics or "
            "score larger images."
        )
    if channels not in (1, 3):
        raise UserError(
            f"LPIPS expected images of 3 channels (RGB) or 1 (grey); these have {channels}. Leave "
            "lpips out of the metrics or score RGB images."
        )
