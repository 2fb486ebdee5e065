"""The definitions that faster code in the trainer is compared with."""

import random

import torch
from torch import Tensor

from mjp_privacy.models.jigsaw import shuffled_order, to_images, to_patches


def shuffle_patches_and_pixels(images: Tensor, patch_size: int, rng: random.Random) -> Tensor:
    """SPP (Table 4, row C): one random order for all patches, one for the pixels of each patch.

    All images and patches share these two orders.
    """
    patches = to_patches(images, patch_size)
    number, length = patches.shape[-2:]
    area = patch_size * patch_size
    pixels = shuffled_order(torch.ones(area, dtype=torch.bool), rng)
    patches = patches.unflatten(-1, (length // area, area))[..., pixels].flatten(-2)
    order = shuffled_order(torch.ones(number, dtype=torch.bool), rng)
    return to_images(patches[..., order, :], patch_size, images.shape[-3])
