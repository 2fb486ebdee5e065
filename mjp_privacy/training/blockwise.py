"""The block-wise masks of `models.jigsaw`, many at a time and on any device.

The procedure is the same, but all masks take each attempt together: there is no loop over masks,
and the host never waits for the device. Only the random numbers are drawn from another stream.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mjp_privacy.models.jigsaw import ATTEMPTS, MIN_ASPECT, MIN_BLOCK, largest_block


def attempts_needed(patches: int, gamma: float) -> int:
    """Attempts after which all but about one mask in 10,000 are complete (measured in a test)."""
    target = int(patches * gamma)
    return 40 + 2 * target if target else 0


def blockwise_masks(count: int, *, grid: int, gamma: float, generator: torch.Generator) -> Tensor:
    """(count, grid²) bool masks, each of at most int(grid² · gamma) patches; generator's device."""
    device = generator.device
    patches, target = grid * grid, int(grid * grid * gamma)
    limit = attempts_needed(patches, gamma)
    draws = torch.rand(limit, 4, count, generator=generator, device=device)
    mask = torch.zeros(count, grid, grid, dtype=torch.bool, device=device)
    masked = torch.zeros(count, device=device)
    failed = torch.zeros(count, device=device)
    for area_draw, aspect_draw, top_draw, left_draw in draws.unbind():
        active = (masked < target) & (failed < ATTEMPTS)
        room = (target - masked).clamp(max=largest_block(patches))
        height, width = _sides(room, area_draw, aspect_draw)
        block = _rectangles(grid, height, width, top_draw, left_draw)
        new = (block & ~mask).sum((1, 2))
        fits = active & (height < grid) & (width < grid) & (new > 0) & (new <= room)
        mask |= block & fits[:, None, None]
        masked += new * fits
        failed = torch.where(fits, 0.0, failed + 1)
    return mask.flatten(1)


def _sides(room: Tensor, area_draw: Tensor, aspect_draw: Tensor) -> tuple[Tensor, Tensor]:
    """Height and width, whole numbers, of a rectangle of random area and aspect for each mask."""
    # With room < MIN_BLOCK the interval is reversed, as in `models.jigsaw`.
    area = MIN_BLOCK + (room - MIN_BLOCK) * area_draw
    log_aspect = math.log(MIN_ASPECT)
    aspect = torch.exp(log_aspect - 2 * log_aspect * aspect_draw)
    return torch.round(torch.sqrt(area * aspect)), torch.round(torch.sqrt(area / aspect))


def _rectangles(
    grid: int, height: Tensor, width: Tensor, top_draw: Tensor, left_draw: Tensor
) -> Tensor:
    """(count, grid, grid) bool: one rectangle per mask, at a random place."""
    line = torch.arange(grid, device=height.device)
    top = torch.floor(top_draw * (grid - height + 1))[:, None]
    left = torch.floor(left_draw * (grid - width + 1))[:, None]
    rows = (line >= top) & (line < top + height[:, None])
    columns = (line >= left) & (line < left + width[:, None])
    return rows[:, :, None] & columns[:, None, :]


def shuffled_orders(mask: Tensor, generator: torch.Generator) -> Tensor:
    """(m, N) permutations that shuffle the masked patches of each row among themselves."""
    number = mask.shape[-1]
    place = torch.arange(number, device=mask.device).expand_as(mask)
    noise = torch.rand(mask.shape, generator=generator, device=mask.device)
    # Both lists hold the masked positions first, then the others in order: the first lists them
    # in order too, the second at random.
    ordered = torch.where(mask, place, place + number).argsort(-1)
    random = torch.where(mask, noise.double(), (place + 1).double()).argsort(-1)
    return torch.empty_like(ordered).scatter_(-1, ordered, random)
