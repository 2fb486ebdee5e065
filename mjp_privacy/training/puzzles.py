"""Which training steps are shuffled, and how.

A puzzle follows from (seed, step) alone, so all processes have the same one. The masks are those of
`models.jigsaw`, many at a time and on any device: they take each attempt together, so the host
never waits for the device. Only the random numbers are drawn from another stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mjp_privacy.core.machine import derive_seed
from mjp_privacy.models.jigsaw import (
    ATTEMPTS,
    MIN_ASPECT,
    MIN_BLOCK,
    Grid,
    largest_block,
    shuffle_patches,
    to_images,
    to_patches,
)
from mjp_privacy.training.config import TrainingConfig

# masks --------------------------------------------------------------------------------------------


def blockwise_masks(count: int, *, grid: int, gamma: float, generator: torch.Generator) -> Tensor:
    """(count, grid²) bool masks, each of at most int(grid² · gamma) patches; generator's device."""
    device = generator.device
    patches, target = grid**2, int(grid**2 * gamma)
    # after so many attempts all but about one mask in 10,000 are complete (measured in a test)
    limit = 40 + 2 * target if target else 0
    draws = torch.rand(limit, 4, count, generator=generator, device=device)
    mask = torch.zeros(count, grid, grid, dtype=torch.bool, device=device)
    masked = torch.zeros(count, device=device)
    failed = torch.zeros(count, device=device)
    log_aspect, line = math.log(MIN_ASPECT), torch.arange(grid, device=device)
    for area_draw, aspect_draw, top_draw, left_draw in draws.unbind():
        active = (masked < target) & (failed < ATTEMPTS)
        room = (target - masked).clamp(max=largest_block(patches))
        # with room < MIN_BLOCK the interval is reversed, as in `models.jigsaw`
        area = MIN_BLOCK + (room - MIN_BLOCK) * area_draw
        aspect = torch.exp(log_aspect - 2 * log_aspect * aspect_draw)
        height = torch.round(torch.sqrt(area * aspect))
        width = torch.round(torch.sqrt(area / aspect))
        top = torch.floor(top_draw * (grid - height + 1))
        left = torch.floor(left_draw * (grid - width + 1))
        rows = (line >= top[:, None]) & (line < (top + height)[:, None])
        columns = (line >= left[:, None]) & (line < (left + width)[:, None])
        block = rows[:, :, None] & columns[:, None, :]
        new = (block & ~mask).sum((1, 2))
        fits = active & (height < grid) & (width < grid) & (new > 0) & (new <= room)
        mask |= block & fits[:, None, None]
        masked += new * fits
        failed = torch.where(fits, 0.0, failed + 1)
    return mask.flatten(1)


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


# steps --------------------------------------------------------------------------------------------

CHUNK = 256  # steps whose masks are drawn together, if a batch shares one mask
MANY = 4096  # masks that are drawn together, if each image has its own


@dataclass(frozen=True)
class Puzzle:
    """One step's mask and permutation (1 or B, N); for SPP also the order of a patch's pixels."""

    mask: Tensor
    permutation: Tensor | None
    pixels: Tensor | None = None


class Puzzles:
    """The puzzle of every step. `part` is this process's slice of the global batch."""

    def __init__(
        self,
        config: TrainingConfig,
        steps_per_epoch: int,
        device: torch.device,
        part: slice = slice(None),
    ) -> None:
        self.jigsaw, self.seed = config.jigsaw, config.seed
        each = self.jigsaw.mask_per == "image"
        self.per_step = config.recipe.batch if each else 1
        self.together = max(MANY // self.per_step, 1) if each else CHUNK  # steps
        self.patch = config.model.patch_size
        self.grid = config.model.img_size // self.patch
        self.device, self.part = device, part if each else slice(None)
        self.first_step = math.ceil(config.first_epoch * steps_per_epoch)
        self._none = torch.zeros(1, self.grid**2, dtype=torch.bool, device=device)
        self._chunk: tuple[int, Tensor, Tensor] | None = None

    def shuffled(self, step: int) -> bool:
        """Whether this step is shuffled; a share of the steps after the first epochs are."""
        if self.jigsaw.shuffle == "none" or step < self.first_step:
            return False
        return derive_seed("shuffled step", self.seed, step) < self.jigsaw.share * 2**63

    def at(self, step: int) -> Puzzle:
        """The puzzle of a step. Unshuffled steps have an empty mask, to keep one graph for all."""
        if not self.shuffled(step):
            return Puzzle(self._none, None)
        if self.jigsaw.shuffle == "patches_and_pixels":
            seed = derive_seed("patches and pixels", self.seed, step)
            generator = torch.Generator(self.device).manual_seed(seed)
            everything = torch.ones_like(self._none)
            pixels = torch.ones(1, self.patch**2, dtype=torch.bool, device=self.device)
            one, other = (shuffled_orders(mask, generator) for mask in (everything, pixels))
            return Puzzle(self._none, one, other[0])
        chunk, place = divmod(step, self.together)
        masks, orders = self._drawn(chunk)
        rows = slice(place * self.per_step, (place + 1) * self.per_step)
        return Puzzle(masks[rows][self.part], orders[rows][self.part])

    def _drawn(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Masks and permutations of a chunk of steps, drawn together because that is faster."""
        if self._chunk is None or self._chunk[0] != chunk:
            seed = derive_seed(f"{self.jigsaw.mask_per} puzzles", self.seed, chunk)
            generator = torch.Generator(self.device).manual_seed(seed)
            count = self.together * self.per_step
            masks = blockwise_masks(
                count, grid=self.grid, gamma=self.jigsaw.gamma, generator=generator
            )
            self._chunk = (chunk, masks, shuffled_orders(masks, generator))
        return self._chunk[1:]


def apply(puzzle: Puzzle, images: Tensor, patch_size: int) -> Tensor:
    """The images (B, C, H, W) shuffled as the puzzle says, in one gather over pixels: which pixel
    each place shows is found by shuffling a picture whose pixels are their own indices."""
    if puzzle.permutation is None:
        return images
    size = images.shape[-1]
    places = torch.arange(size * size, device=puzzle.mask.device).view(1, 1, size, size)
    places = places.expand(len(puzzle.permutation), -1, -1, -1)
    if puzzle.pixels is not None:
        patches = to_patches(places, patch_size)[..., puzzle.pixels]
        places = to_images(patches, Grid.of(size, patch_size), patch_size)
    order = shuffle_patches(places, puzzle.permutation, patch_size).flatten(1)
    flat = images.flatten(2)
    if len(order) == 1:
        return flat.index_select(2, order[0]).view_as(images)
    return flat.gather(2, order.unsqueeze(1).expand_as(flat)).view_as(images)
