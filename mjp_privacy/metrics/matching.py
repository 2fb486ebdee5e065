"""What belongs to what: reconstructions to the pictures of a batch, patches to places, and whether
a reconstruction points to its own image among others: even a poor one may tell whose it is.

To see where it points, each reconstruction is compared with every reference, and the references are
ranked by distance:

    pixels    mean squared error
    LPIPS     with AlexNet
    features  cosine of AlexNet's last convolutions, averaged over space
    patches   mean squared error after the patches were matched one to one, so that the order in
              which patches stand does not matter

AlexNet was trained on ImageNet's labels and is not the attacked network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate, normalize

from mjp_privacy.metrics.pictures import (
    SMALLEST,
    alexnet_layers,
    decibels,
    lpips_heads,
    mse,
    of_length_one,
    psnr,
)
from mjp_privacy.metrics.statistics import Floats, Share, independent_trials
from mjp_privacy.models.jigsaw import Grid, to_images, to_patches

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
    columns: NDArray[np.intp] = scipy.optimize.linear_sum_assignment(costs)[1]
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


def neighbour_accuracy(placed: Tensor, mask: Tensor, grid: Grid) -> Tensor:
    """(m,) share of restored neighbours: of all pairs of adjacent places of which at least one is
    masked, those whose patches are adjacent in the same direction in the plain image. NaN where
    nothing was masked."""
    across = grid.columns
    row, column = (part.reshape(-1, *grid) for part in (placed // across, placed % across))
    hidden = mask.reshape(-1, *grid)
    right = (row[:, :, 1:] == row[:, :, :-1]) & (column[:, :, 1:] == column[:, :, :-1] + 1)
    down = (column[:, 1:] == column[:, :-1]) & (row[:, 1:] == row[:, :-1] + 1)
    touched = hidden[:, :, 1:] | hidden[:, :, :-1], hidden[:, 1:] | hidden[:, :-1]
    good = (right & touched[0]).sum((1, 2)) + (down & touched[1]).sum((1, 2))
    pairs = touched[0].sum((1, 2)) + touched[1].sum((1, 2))
    accuracy: Tensor = good.double() / pairs
    return accuracy


def rearranged(images: Tensor, placed: Tensor, patch_size: int) -> Tensor:
    """The images (m, C, H, W) with each patch moved to the place of the plain patch it was matched
    to: an oracle's order, the upper bound for any jigsaw solver on these patches."""
    patches = to_patches(images, patch_size)
    index = placed.argsort(-1).unsqueeze(-1).expand_as(patches)
    return to_images(patches.gather(-2, index), Grid.in_pictures(images, patch_size), patch_size)


# ------------------------------------------------------------------------------------------------
# Whether a reconstruction points to its own image.

SIDE = 64
"""Pixels a side to which images are shrunk before they are compared."""


@dataclass(frozen=True)
class Pointing:
    """How often the own image is the nearest, and how near it ranks."""

    first: Share
    reciprocal_rank: float  # mean of 1 / rank of the own image


def pointing(distances: Floats, photographs: Sequence[str]) -> Pointing:
    """From (n, n) distances, [i, j] of reconstruction i to reference j; i's own is [i, i].

    References as near as the own one rank before it. `photographs` names the one that each image
    was cut from.

        pointing(np.array([[0.1, 0.5], [0.2, 0.3]]), ["cat", "dog"]).reciprocal_rank  # 0.75
    """
    own = np.diag(distances)[:, None]
    ranks = (~(distances > own)).sum(axis=1)  # the own one is among them
    first = Share(int((ranks == 1).sum()), len(ranks), independent_trials(photographs))
    return Pointing(first, float((1 / ranks).mean()))


def shrink(images: Tensor) -> Tensor:
    """(n, C, H, W) with the longer side at most 64: means over areas, never enlarged."""
    longer = max(images.shape[-2:])
    if longer <= SIDE:
        return images
    size = [max(1, round(side * SIDE / longer)) for side in images.shape[-2:]]
    return interpolate(images.float(), size=size, mode="area")


def distances(reconstructions: Tensor, references: Tensor) -> dict[str, Floats]:
    """(n, n) by name, of shrunk images (n, C, H, W) in [0, 1]; pixels alone where they are below 31
    pixels a side, or neither grey nor RGB."""
    found, known = _vectors(reconstructions), _vectors(references)
    return {name: _squared_distances(found[name], known[name]) for name in known}


def _vectors(images: Tensor) -> dict[str, Tensor]:
    """Images as rows whose squared distances are the distances; of features twice as much.

    LPIPS is Σ_layers mean_space Σ_c w_c (f_c - g_c)², so each layer times sqrt(w_c / HW) makes it
    a squared distance.
    """
    pixels = images.double().flatten(1) / math.sqrt(images[0].numel())
    channels, height, width = images.shape[1:]
    if channels not in (1, 3) or min(height, width) < SMALLEST["lpips"]:
        return {"pixels": pixels}
    layers = [layer.double() for layer in alexnet_layers(images)]
    parts = []
    for layer, head in zip(layers, lpips_heads(), strict=True):
        weights = head.flatten() / layer.shape[1]
        parts.append((of_length_one(layer) * weights.sqrt()).flatten(1))
    features = normalize(layers[-1].mean(1))
    return {"pixels": pixels, "LPIPS": torch.cat(parts, dim=1), "features": features}


def _squared_distances(left: Tensor, right: Tensor) -> Floats:
    """(n, m) squared distances between rows."""
    norms = left.square().sum(1)[:, None] + right.square().sum(1)
    squares: Floats = (norms - 2 * left @ right.T).clamp(min=0).numpy()
    return squares


def matched_psnr(reconstructions: Tensor, references: Tensor, patch_size: int) -> Floats:
    """(n,) PSNR after patches were matched one to one to those of the own image.

    The smallest possible error over all orders of patches: an upper bound for jigsaw solvers that
    does not use where patches were masked. inf where every patch is exact.
    """
    patches = to_patches(references, patch_size).shape[1]
    everywhere = torch.ones((len(references), patches), dtype=torch.bool)
    placed = matched_patches(reconstructions, references, everywhere, patch_size)
    found: Floats = psnr(rearranged(reconstructions, placed, patch_size), references).numpy()
    return found


def matched_distances(reconstructions: Tensor, references: Tensor, patch_size: int) -> Floats:
    """(n, n) mean squared errors after matching patches, shrunk to about 64 pixels a side.

    Right where it decides a rank: up to the own distance. A reference whose nearest patches are
    farther than that keeps their distance, which is a lower bound.
    """
    left, right = (_small_patches(x, patch_size) for x in (reconstructions, references))
    own = [_matched(*pair) for pair in zip(left, right, strict=True)]
    rows = zip(left, own, strict=True)
    return np.array([[_matched(x, y, most) for y in right] for x, most in rows])


def _small_patches(images: Tensor, patch_size: int) -> Tensor:
    """(n, N, D) float64: each patch shrunk alone, so that no pixel mixes two patches."""
    patches = to_patches(images.double(), patch_size)
    side = max(1, min(patch_size, SIDE // (max(images.shape[-2:]) // patch_size)))
    tiles = patches.reshape(-1, images.shape[1], patch_size, patch_size)
    return adaptive_avg_pool2d(tiles, side).reshape(*patches.shape[:2], -1)


def _matched(patches: Tensor, others: Tensor, most: float = math.inf) -> float:
    """The mean squared error of the best assignment of patches (N, D), or a bound below it where
    that is above `most`."""
    errors = _squared_distances(patches, others) / patches.shape[-1]
    bound = float(max(errors.min(axis=0).mean(), errors.min(axis=1).mean()))
    if bound > most:
        return bound
    return float(errors[np.arange(len(errors)), cheapest(errors)].mean())
