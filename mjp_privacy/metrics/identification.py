"""Does a reconstruction point to its own image among others? Even a poor one may tell whose it is.

Each reconstruction is compared with every reference, and the references are ranked by distance:

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
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate, normalize

from mjp_privacy.metrics.lpips import SMALLEST, alexnet_layers, lpips_heads, of_length_one
from mjp_privacy.metrics.matching import cheapest, matched_patches, rearranged
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.metrics.statistics import Floats, Share, independent_trials
from mjp_privacy.models.jigsaw import to_patches

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
    if channels not in (1, 3) or min(height, width) < SMALLEST:
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


# patches ------------------------------------------------------------------------------------------


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
    own = [_matched(_patch_errors(*pair)) for pair in zip(left, right, strict=True)]
    rows = zip(left, own, strict=True)
    return np.array([[_matched(_patch_errors(x, y), most) for y in right] for x, most in rows])


def _small_patches(images: Tensor, patch_size: int) -> Tensor:
    """(n, N, D) float64: each patch shrunk alone, so that no pixel mixes two patches."""
    patches = to_patches(images.double(), patch_size)
    side = max(1, min(patch_size, SIDE // (max(images.shape[-2:]) // patch_size)))
    tiles = patches.reshape(-1, images.shape[1], patch_size, patch_size)
    return adaptive_avg_pool2d(tiles, side).reshape(*patches.shape[:2], -1)


def _patch_errors(patches: Tensor, others: Tensor) -> Floats:
    """(N, N) mean squared error of each patch to each other one."""
    return _squared_distances(patches, others) / patches.shape[-1]


def _matched(errors: Floats, most: float = math.inf) -> float:
    """The mean error of the best assignment, or a bound below it where that is above `most`."""
    bound = float(max(errors.min(axis=0).mean(), errors.min(axis=1).mean()))
    if bound > most:
        return bound
    return float(errors[np.arange(len(errors)), cheapest(errors)].mean())
