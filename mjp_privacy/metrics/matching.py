"""Which reconstruction of a batch belongs to which picture, where their order means nothing."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.metrics.pictures import decibels, mse
from mjp_privacy.models.jigsaw import to_images, to_patches

EXACT = 200.0
"""dB that an identical picture counts: above any other float32 pictures, which end near 155."""
NOTHING = -1000.0
"""dB that a picture with NaN counts: it is given to a picture that nothing else fits."""


def assigned(reconstructions: Tensor, references: Tensor) -> Tensor:
    """The reconstruction that belongs to each reference: the one-to-one assignment with the
    largest sum of PSNRs. (m, C, H, W) twice -> (m,) places of reconstructions.

    assigned(pictures.flip(0), pictures)  # tensor([m - 1, ..., 1, 0])
    """
    each = [mse(reconstructions, picture.expand_as(reconstructions)) for picture in references]
    worth = decibels(torch.stack(each)).clamp(max=EXACT).nan_to_num(NOTHING)
    return torch.from_numpy(cheapest(-worth.cpu().numpy()))


def cheapest(costs: NDArray[np.floating]) -> NDArray[np.intp]:
    """The column of each row in the one-to-one assignment with the smallest sum of costs."""
    from scipy.optimize import linear_sum_assignment  # which takes .4 s to import

    columns: NDArray[np.intp] = linear_sum_assignment(costs)[1]
    return columns


# ------------------------------------------------------------------------------------------------
# How well patches were put back into their places, read from the reconstructed image.
#
# The patch embedding's gradient is the same for every order of the masked patches (gradients of
# deeper layers differ, by little), so its equations cannot name the fed patches. What can be
# measured is which patch of the plain image stands where: the masked patches of the reconstruction
# are matched one to one to those of the plain image, so that the sum of squared errors is smallest
# (an assignment problem). Equal patches are interchangeable.

TIE = 1e-12  # makes a patch prefer its own place among equal ones; far below any real difference


def matched_patches(images: Tensor, plain: Tensor, mask: Tensor, patch_size: int) -> Tensor:
    """(m, N) int64: which plain patch stands at each place; unmasked places hold their own patch.

    images, plain (m, C, H, W) in [0, 1]; mask (m, N) bool, the places to be matched.
    """
    patches, plain_patches = (to_patches(x.double(), patch_size) for x in (images, plain))
    placed = torch.arange(mask.shape[-1]).repeat(len(mask), 1)
    for at, hidden in enumerate(mask):
        places = hidden.nonzero().flatten()
        cost = torch.cdist(patches[at, places], plain_patches[at, places]).square()
        cost -= TIE * torch.eye(len(places), dtype=cost.dtype)
        placed[at, places] = places[torch.from_numpy(cheapest(cost.numpy()))]
    return placed


def direct_accuracy(placed: Tensor, mask: Tensor) -> Tensor:
    """(m,) share of masked places that hold their own patch; NaN where nothing was masked."""
    in_place = placed == torch.arange(placed.shape[-1])
    return (in_place & mask).sum(-1).double() / mask.sum(-1)


def neighbour_accuracy(placed: Tensor, mask: Tensor) -> Tensor:
    """(m,) share of restored neighbours: of all pairs of adjacent places of which at least one is
    masked, those whose patches are adjacent in the same direction in the plain image. NaN where
    nothing was masked."""
    grid = math.isqrt(placed.shape[-1])
    row, column = (part.reshape(-1, grid, grid) for part in (placed // grid, placed % grid))
    hidden = mask.reshape(-1, grid, grid)
    right = (row[:, :, 1:] == row[:, :, :-1]) & (column[:, :, 1:] == column[:, :, :-1] + 1)
    down = (column[:, 1:] == column[:, :-1]) & (row[:, 1:] == row[:, :-1] + 1)
    touched = hidden[:, :, 1:] | hidden[:, :, :-1], hidden[:, 1:] | hidden[:, :-1]
    good = (right & touched[0]).sum((1, 2)) + (down & touched[1]).sum((1, 2))
    pairs = touched[0].sum((1, 2)) + touched[1].sum((1, 2))
    accuracy: Tensor = good.double() / pairs
    return accuracy


def rearranged(images: Tensor, placed: Tensor, patch_size: int) -> Tensor:
    """The image with each patch moved to the place of the plain patch it was matched to.

    This is an oracle's order, the upper bound for any jigsaw solver on these patches. (m, C, H, W).
    """
    patches = to_patches(images, patch_size)
    index = placed.argsort(-1).unsqueeze(-1).expand_as(patches)
    return to_images(patches.gather(-2, index), patch_size, images.shape[-3])
