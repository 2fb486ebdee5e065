"""Predictions for whole pictures by a network that takes squares of one size: sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mjp_privacy.training.segmentation.heads import resized

STRIDE = 2 / 3
"""Of a window's side, between two windows: 341 of 512 pixels, as ViTs are commonly evaluated."""
TOGETHER = 8
"""Windows that the network sees at once."""
RESIZED = 1 << 26
"""Numbers of the resized logits that are held at once: 256 MiB, beside some numbers a pixel."""


def starts(length: int, side: int) -> list[int]:
    """Where windows begin along a side: STRIDE apart, but for the last, which ends with it."""
    step, last = max(int(side * STRIDE), 1), max(length - side, 0)
    return [*range(0, last, step), last]


def logits_of(network: Callable[[Tensor], Tensor], picture: Tensor, side: int) -> Tensor:
    """(K, h, w): the mean over all windows that hold a pixel; picture (3, h, w), h, w ≥ side."""
    height, width = picture.shape[-2:]
    corners = [(top, left) for top in starts(height, side) for left in starts(width, side)]
    total: Tensor | None = None
    times = picture.new_zeros(1, height, width)
    for first in range(0, len(corners), TOGETHER):
        chosen = corners[first : first + TOGETHER]
        crops = [picture[:, top : top + side, left : left + side] for top, left in chosen]
        for (top, left), logits in zip(chosen, network(torch.stack(crops)).float(), strict=True):
            if total is None:
                total = logits.new_zeros(len(logits), height, width)
            total[:, top : top + side, left : left + side] += logits
            times[:, top : top + side, left : left + side] += 1
    assert total is not None
    return total / times


def predicted(
    network: Callable[[Tensor], Tensor], picture: Tensor, side: int, size: Sequence[int]
) -> Tensor:
    """(H, W): the class of every pixel of the label map, whose size this is.

    Some classes at a time are resized: all 150 of a photograph of 24 megapixels would take 14 GB.
    """
    logits = logits_of(network, picture, side)
    height, width = size
    together = max(1, RESIZED // (height * width))
    best = logits.new_full((height, width), -torch.inf)
    answer = torch.zeros(height, width, dtype=torch.long, device=logits.device)
    for first in range(0, len(logits), together):
        highest, where = resized(logits[None, first : first + together], size)[0].max(0)
        answer = torch.where(highest > best, where + first, answer)
        best = torch.maximum(best, highest)
    return answer
