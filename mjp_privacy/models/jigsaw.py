"""The input side of MJP: which patches are selected, and how they are shuffled.

Conventions: N patches of a grid in row-major order; a mask is True where a patch was
shuffled; `shuffled[j] = plain[permutation[j]]`, and `permutation[j] == j` outside the mask.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.core.schema import Size, height_width

MIN_BLOCK = 8  # patches
MIN_ASPECT = 0.3
ATTEMPTS = 10  # tries to place one block


class Grid(NamedTuple):
    """How many patches a picture has down and across.

    Grid.of(224, 16) is Grid(14, 14), Grid.of((96, 64), 16) is Grid(6, 4)
    """

    rows: int
    columns: int

    @classmethod
    def of(cls, size: Size, patch_size: int) -> Grid:
        """The whole patches of pictures of this size."""
        height, width = height_width(size)
        return cls(height // patch_size, width // patch_size)

    @classmethod
    def in_pictures(cls, images: Tensor, patch_size: int) -> Grid:
        """The whole patches of pictures (..., H, W)."""
        height, width = images.shape[-2:]
        return cls.of((height, width), patch_size)

    @property
    def patches(self) -> int:
        """N"""
        return self.rows * self.columns

    def pixels(self, patch_size: int) -> tuple[int, int]:
        """Height and width of a picture of such patches."""
        return self.rows * patch_size, self.columns * patch_size

    @property
    def seed(self) -> int | str:
        """What seeds are derived from."""
        return self.rows if self.rows == self.columns else f"{self.rows}×{self.columns}"


def largest_block(patches: int) -> int:
    """The most new patches one rectangle may mask: the paper's 75 of 196, scaled to `patches`."""
    return int(75 * patches / 196)


def blockwise_mask(grid: Grid, gamma: float, rng: random.Random) -> Tensor:
    """(N,) bool mask of rectangles (BEiT's procedure), at most int(N * gamma) patches.

    Rectangles of random area and aspect are added until the target is met or ATTEMPTS in a row did
    not fit, so fewer patches may be masked; at small gamma the mask may be empty.
    Random numbers are drawn in the order of the authors' code: one `random.Random(0)`, used for
    one mask after the other, gives their masks.
    """
    if not 0.0 <= gamma <= 1.0:
        raise UserError(f"gamma is a share of the patches: expected 0 to 1, got {gamma}.")
    mask = torch.zeros(grid, dtype=torch.bool)
    target = int(grid.patches * gamma)
    masked = 0
    while masked < target:
        room = min(target - masked, largest_block(grid.patches))
        added = _add_block(mask, room, rng)
        if added == 0:
            break
        masked += added
    return mask.flatten()


def _add_block(mask: Tensor, room: int, rng: random.Random) -> int:
    """Mask one rectangle that adds 1 to `room` new patches. Returns how many, 0 if none fits."""
    rows, columns = mask.shape
    log_aspect = math.log(MIN_ASPECT)
    for _ in range(ATTEMPTS):
        # With room < MIN_BLOCK the interval is reversed, as in the authors' code: this is how
        # blocks smaller than MIN_BLOCK come about.
        area = rng.uniform(MIN_BLOCK, room)
        aspect = math.exp(rng.uniform(log_aspect, -log_aspect))
        height = round(math.sqrt(area * aspect))
        width = round(math.sqrt(area / aspect))
        if height >= rows or width >= columns:
            continue
        top = rng.randint(0, rows - height)
        left = rng.randint(0, columns - width)
        block = mask[top : top + height, left : left + width]
        new = height * width - int(block.sum())
        if 0 < new <= room:
            block.fill_(True)
            return new
    return 0


def shuffled_order(mask: Tensor, rng: random.Random) -> Tensor:
    """(N,) permutation that shuffles the masked patches among themselves (fixed points allowed)."""
    positions = mask.nonzero().flatten().tolist()
    order = list(positions)
    rng.shuffle(order)
    permutation = torch.arange(mask.numel())
    permutation[positions] = torch.tensor(order, dtype=torch.long)
    return permutation


def draw_masks(
    image_ids: Sequence[str], *, grid: Grid, gamma: float, round: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Mask and permutation of each image, (m, N) each, from (seed, image_id, round, grid, gamma).

    They depend on nothing else, so every model, setting and attack sees the same puzzle.
    """
    masks, permutations = [], []
    for image_id in image_ids:
        rng = random.Random(derive_seed("jigsaw", seed, image_id, round, grid.seed, float(gamma)))
        mask = blockwise_mask(grid, gamma, rng)
        masks.append(mask)
        permutations.append(shuffled_order(mask, rng))
    return torch.stack(masks), torch.stack(permutations)


def to_patches(images: Tensor, patch_size: int) -> Tensor:
    """(..., C, H, W) -> (..., N, C*P*P), channels first, as the patch embedding flattens them."""
    *lead, channels, height, width = images.shape
    if height % patch_size or width % patch_size:
        raise UserError(
            f"Images of {height}×{width} cannot be cut into whole {patch_size}×{patch_size} "
            "patches: resize or crop them to a multiple."
        )
    rows, columns = height // patch_size, width // patch_size
    tiles = images.reshape(*lead, channels, rows, patch_size, columns, patch_size)
    k = len(lead)
    tiles = tiles.permute(*range(k), k + 1, k + 3, k, k + 2, k + 4)
    return tiles.reshape(*lead, rows * columns, channels * patch_size * patch_size)


def to_images(patches: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """The inverse of `to_patches`: (..., N, C*P*P) -> (..., C, H, W)."""
    *lead, number, entries = patches.shape
    if grid.patches != number:
        raise UserError(
            f"Expected {grid.rows} × {grid.columns} patches of a picture, got {number}."
        )
    k, channels = len(lead), entries // patch_size**2
    tiles = patches.reshape(*lead, *grid, channels, patch_size, patch_size)
    tiles = tiles.permute(*range(k), k + 2, k, k + 3, k + 1, k + 4)
    return tiles.reshape(*lead, channels, grid.rows * patch_size, grid.columns * patch_size)


def shuffle_patches(images: Tensor, permutation: Tensor, patch_size: int) -> Tensor:
    """Images (m, C, H, W) with patch permutation[:, j] in place of patch j."""
    patches = to_patches(images, patch_size)
    if permutation.shape[-1] != patches.shape[-2]:
        raise UserError(
            f"Expected a permutation of the image's {patches.shape[-2]} patches, got one of "
            f"{permutation.shape[-1]}: use the model's own image and patch size."
        )
    index = permutation.to(images.device).unsqueeze(-1).expand_as(patches)
    return to_images(patches.gather(-2, index), Grid.in_pictures(images, patch_size), patch_size)
