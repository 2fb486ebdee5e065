"""Which steps are shuffled, and how: from (seed, step) alone, so equal on every process."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mjp_privacy.models.jigsaw import shuffle_patches, to_images, to_patches
from mjp_privacy.seeding import derive_seed
from mjp_privacy.training.blockwise import blockwise_masks, shuffled_orders
from mjp_privacy.training.config import TrainingConfig

CHUNK = 256  # steps whose masks are made together, where a batch shares one


@dataclass(frozen=True)
class Puzzle:
    """One step's: mask and permutation (1 or B, N), and for SPP the order of a patch's pixels."""

    mask: Tensor
    permutation: Tensor | None
    pixels: Tensor | None = None


class Puzzles:
    """The jigsaw of every step. `part` is this process's slice of the global batch."""

    def __init__(
        self,
        config: TrainingConfig,
        steps_per_epoch: int,
        device: torch.device,
        part: slice = slice(None),
    ) -> None:
        self.jigsaw, self.seed, self.batch = config.jigsaw, config.seed, config.recipe.batch
        self.patch = config.model.patch_size
        self.grid = config.model.img_size // self.patch
        self.device, self.part = device, part
        self.first_step = math.ceil(config.first_epoch * steps_per_epoch)
        self._none = torch.zeros(1, self.grid**2, dtype=torch.bool, device=device)
        self._chunk: tuple[int, Tensor, Tensor] | None = None

    def shuffled(self, step: int) -> bool:
        if self.jigsaw.shuffle == "none" or step < self.first_step:
            return False
        return derive_seed("shuffled step", self.seed, step) < self.jigsaw.share * 2**63

    def at(self, step: int) -> Puzzle:
        """A step without shuffling has an empty mask, so the graph is the same in each."""
        if not self.shuffled(step):
            return Puzzle(self._none, None)
        if self.jigsaw.shuffle == "patches_and_pixels":
            return self._all_patches_and_pixels(step)
        if self.jigsaw.mask_per == "image":
            masks, orders = self._draw("image puzzles", step, self.batch)
            return Puzzle(masks[self.part], orders[self.part])
        chunk, place = divmod(step, CHUNK)
        if self._chunk is None or self._chunk[0] != chunk:
            self._chunk = (chunk, *self._draw("batch puzzles", chunk, CHUNK))
        _, masks, orders = self._chunk
        return Puzzle(masks[place : place + 1], orders[place : place + 1])

    def _draw(self, name: str, number: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(derive_seed(name, self.seed, number))
        masks = blockwise_masks(count, grid=self.grid, gamma=self.jigsaw.gamma, generator=generator)
        return masks, shuffled_orders(masks, generator)

    def _all_patches_and_pixels(self, step: int) -> Puzzle:
        seed = derive_seed("patches and pixels", self.seed, step)
        generator = torch.Generator(self.device).manual_seed(seed)
        everything = torch.ones_like(self._none)
        pixels = torch.ones(1, self.patch**2, dtype=torch.bool, device=self.device)
        orders = [shuffled_orders(mask, generator) for mask in (everything, pixels)]
        return Puzzle(self._none, orders[0], orders[1][0])


def apply(puzzle: Puzzle, images: Tensor, patch_size: int) -> Tensor:
    """The images (B, C, H, W) as the model is fed them."""
    if puzzle.permutation is None:
        return images
    images = shuffle_patches(images, puzzle.permutation, patch_size)
    if puzzle.pixels is None:
        return images
    patches = to_patches(images, patch_size).unflatten(-1, (images.shape[1], -1))
    return to_images(patches[..., puzzle.pixels].flatten(-2), patch_size, images.shape[1])
