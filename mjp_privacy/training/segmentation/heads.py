"""Heads that give every pixel a class: from maps of features (B, D, h, w) to logits (B, K, h', w').

`network` enlarges the logits to the picture's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mjp_privacy.training.segmentation.features import Maps

POOLED = (1, 2, 3, 6)
"""Sides of the grids over which the pyramid's top is averaged."""


class LinearHead(nn.Module):
    """One linear layer on every token of the last map."""

    def __init__(self, maps: Maps, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(maps.widths[-1], classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return cast(Tensor, self.classifier(maps[-1]))


class PyramidHead(nn.Module):
    """A head in the style of UPerNet (Xiao et al., 2018).

    Each map is brought to `channels` and its size in the pyramid; the last one also reads averages
    over the whole picture. From the top down each level is added to the next larger one; all levels
    together are then read at the largest size. In place of batch norm, which needs large batches
    and keeps statistics, each map of a picture is normed as a whole; there is no second head for an
    auxiliary loss.
    """

    def __init__(self, maps: Maps, classes: int, channels: int) -> None:
        super().__init__()
        self.factors = maps.factors
        self.sides = nn.ModuleList(_layer(width, channels, 1) for width in maps.widths)
        self.pooled = nn.ModuleList(_layer(channels, channels, 1) for _ in POOLED)
        self.top = _layer(channels * (len(POOLED) + 1), channels, 3)
        self.smooth = nn.ModuleList(_layer(channels, channels, 3) for _ in maps.widths[:-1])
        self.joined = _layer(channels * len(maps.widths), channels, 3)
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        levels = []
        for read, side, factor in zip(maps, self.sides, self.factors, strict=True):
            size = [max(round(length * factor), 1) for length in read.shape[-2:]]
            levels.append(resized(side(read), size))
        levels[-1] = self._with_surroundings(levels[-1])
        for below in range(len(levels) - 2, -1, -1):
            levels[below] = levels[below] + resized(levels[below + 1], levels[below].shape[-2:])
        smooth = [layer(level) for layer, level in zip(self.smooth, levels, strict=False)]
        largest = levels[0].shape[-2:]
        joined = [resized(level, largest) for level in (*smooth, levels[-1])]
        return cast(Tensor, self.classifier(self.joined(torch.cat(joined, 1))))

    def _with_surroundings(self, top: Tensor) -> Tensor:
        size = top.shape[-2:]
        around = [
            resized(layer(averages(top, side)), size)
            for layer, side in zip(self.pooled, POOLED, strict=True)
        ]
        return cast(Tensor, self.top(torch.cat((top, *around), 1)))


def averages(picture: Tensor, side: int) -> Tensor:
    """Means over a grid of side × side fields, (B, C, side, side): what adaptive average pooling
    gives, as two products of matrices, whose gradient is deterministic on every device."""
    rows, columns = (_fields(length, side).to(picture) for length in picture.shape[-2:])
    return rows @ picture @ columns.transpose(0, 1)


def _fields(length: int, side: int) -> Tensor:
    """(side, length): in each row, equal weights on the places of one field."""
    weights = torch.zeros(side, length)
    for field in range(side):
        first, last = field * length // side, math.ceil((field + 1) * length / side)
        weights[field, first:last] = 1 / (last - first)
    return weights


def resized(picture: Tensor, size: Sequence[int]) -> Tensor:
    """The picture (B, C, h, w) at another size, bilinear."""
    if picture.shape[-2:] == torch.Size(size):
        return picture
    return F.interpolate(picture, size=list(size), mode="bilinear", align_corners=False)


def _layer(inputs: int, outputs: int, side: int) -> nn.Sequential:
    """A convolution that keeps the size, a norm over all channels and places, and ReLU.

    Norms of fewer channels would leave nothing of a map of one place.
    """
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False),
        nn.GroupNorm(1, outputs),
        nn.ReLU(),
    )
