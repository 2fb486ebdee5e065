"""The input side of MJP: which patches are selected, and how they are shuffled.

Conventions: N patches of a square grid in row-major order; a mask is True where a patch was
shuffled; `shuffled[j] = plain[permutation[j]]`, and `permutation[j] == j` outside the mask.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed

MIN_BLOCK = 8  # patches
MIN_ASPECT = 0.3
ATTEMPTS = 10  # tries to place one block


def largest_block(patches: int) -> int:
    """The most new patches one rectangle may mask: the paper's 75 of 196, scaled to `patches`."""
    return int(75 * patches / 196)


def blockwise_mask(grid: int, gamma: float, rng: random.Random) -> Tensor:
    """(grid*grid,) bool mask of rectangles (BEiT's procedure), at most int(N * gamma) patches.

    Rectangles of random area and aspect are added until the target is met or ATTEMPTS in a row did
    not fit, so fewer patches may be masked; at small gamma the mask may be empty.
    Random numbers are drawn in the order of the authors' code: one `random.Random(0)`, used for
    one mask after the other, gives their masks.
    """
    if not 0.0 <= gamma <= 1.0:
        raise UserError(f"gamma is a share of the patches: expected 0 to 1, got {gamma}.")
    mask = torch.zeros(grid, grid, dtype=torch.bool)
    target = int(grid * grid * gamma)
    masked = 0
    while masked < target:
        room = min(target - masked, largest_block(grid * grid))
        added = _add_block(mask, room, rng)
        if added == 0:
            break
        masked += added
    return mask.flatten()


def _add_block(mask: Tensor, room: int, rng: random.Random) -> int:
    """Mask one rectangle that adds 1 to `room` new patches. Returns how many, 0 if none fits."""
    grid = mask.shape[0]
    log_aspect = math.log(MIN_ASPECT)
    for _ in range(ATTEMPTS):
        # With room < MIN_BLOCK the interval is reversed, as in the authors' code: this is how
        # blocks smaller than MIN_BLOCK come about.
        area = rng.uniform(MIN_BLOCK, room)
        aspect = math.exp(rng.uniform(log_aspect, -log_aspect))
        height = round(math.sqrt(area * aspect))
        width = round(math.sqrt(area / aspect))
        if height >= grid or width >= grid:
            continue
        top = rng.randint(0, grid - height)
        left = rng.randint(0, grid - width)
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
    image_ids: Sequence[str], *, grid: int, gamma: float, round: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Mask and permutation of each image, (m, N) each, from (seed, image_id, round, grid, gamma).

    They depend on nothing else, so every model, setting and attack sees the same puzzle.
    """
    masks, permutations = [], []
    for image_id in image_ids:
        rng = random.Random(derive_seed("jigsaw", seed, image_id, round, grid, float(gamma)))
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


def to_images(patches: Tensor, patch_size: int, channels: int = 3) -> Tensor:
    """The inverse of `to_patches` for a square grid."""
    *lead, number, _ = patches.shape
    grid = math.isqrt(number)
    if grid * grid != number:
        raise UserError(f"Expected a square grid of patches, got {number}: use square images.")
    k = len(lead)
    tiles = patches.reshape(*lead, grid, grid, channels, patch_size, patch_size)
    tiles = tiles.permute(*range(k), k + 2, k, k + 3, k + 1, k + 4)
    return tiles.reshape(*lead, channels, grid * patch_size, grid * patch_size)


def shuffle_patches(images: Tensor, permutation: Tensor, patch_size: int) -> Tensor:
    """Images (m, C, H, W) with patch permutation[:, j] in place of patch j."""
    patches = to_patches(images, patch_size)
    if permutation.shape[-1] != patches.shape[-2]:
        raise UserError(
            f"Expected a permutation of the image's {patches.shape[-2]} patches, got one of "
            f"{permutation.shape[-1]}: use square images and the model's own patch size."
        )
    index = permutation.to(images.device).unsqueeze(-1).expand_as(patches)
    return to_images(patches.gather(-2, index), patch_size, images.shape[-3])
