"""Which reconstruction of a batch belongs to which picture, where their order means nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from mjp_privacy.metrics.lpips import SMALLEST, alexnet_layers, lpips_heads
from mjp_privacy.metrics.pictures import decibels, mse
from mjp_privacy.metrics.statistics import Floats, Share
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
    _, places = linear_sum_assignment(worth.cpu().numpy(), maximize=True)
    return torch.from_numpy(places)


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
        _, columns = linear_sum_assignment(cost.numpy())
        placed[at, places] = places[torch.as_tensor(columns, dtype=torch.long)]
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


# ------------------------------------------------------------------------------------------------
# Does a reconstruction point to its own image among all? Even a poor picture may tell who it is.
#
# Each reconstruction is compared with every reference, and the references are ranked by distance:
#
#     pixels      mean squared error
#     perceptual  LPIPS with AlexNet
#     features    1 - cosine of AlexNet's last convolutions, averaged over space
#     patches     mean squared error after the patches were matched one to one, so that the order in
#                 which patches stand does not matter
#
# All images are first shrunk by area to at most 64 pixels a side, patch by patch for `patches`.
# AlexNet was trained on ImageNet's labels and is not the attacked network. Where another reference
# is as near as the own one, the own one ranks behind it.

SIDE = 64
MOST = 200  # images compared with one another
MOST_MATCHED = 30  # of them, for `patches`: each pair is an assignment problem
CHUNK = 16  # images that the network sees at a time


@dataclass(frozen=True)
class Pointing:
    """How often the own image is the nearest, and how near it ranks."""

    first: Share
    reciprocal_rank: float  # mean of 1 / rank of the own image

    @property
    def chance(self) -> float:
        """The share of first ranks, in percent, of an order drawn by lot."""
        return 100 / self.first.of


@dataclass(frozen=True)
class Identification:
    """Ranks by each distance; None where it cannot be computed."""

    n: int
    pixels: Pointing
    perceptual: Pointing | None  # None: images below 31 pixels, or neither grey nor RGB
    features: Pointing | None
    patches: Pointing | None  # None: no `matched` distances were given


@dataclass(frozen=True)
class Embedding:
    """Shrunk images as vectors, so that all distances come from one matrix product."""

    pixels: Tensor  # (n, C*h*w) float64
    perceptual: Tensor | None  # (n, F): squared distances are LPIPS
    features: Tensor | None  # (n, 256) of length 1


def identify(
    reconstructions: Tensor, references: Tensor, *, matched: Floats | None = None
) -> Identification:
    """Rank the references for each reconstruction; the i-th belongs to the i-th.

    reconstructions, references (n, C, H, W) in [0, 1], 2 <= n <= 200; `matched` are the
    `matched_distances` of at most 30 pairs of them.

        identify(noisy, photographs).pixels.first.text()  # "197 of 200 (98 %, 96–99.5)"
    """
    n = len(reconstructions)
    if reconstructions.shape != references.shape or not 2 <= n <= MOST:
        raise ValueError(f"expected 2 to {MOST} pairs of images of one size, got {n}")
    found, known = embed(reconstructions), embed(references)
    perceptible = seen = None
    if found.perceptual is not None and known.perceptual is not None:
        perceptible = pointing(_squared_distances(found.perceptual, known.perceptual))
    if found.features is not None and known.features is not None:
        seen = pointing((1 - found.features @ known.features.T).double().numpy())
    return Identification(
        n=n,
        pixels=pointing(_squared_distances(found.pixels, known.pixels)),
        perceptual=perceptible,
        features=seen,
        patches=None if matched is None else pointing(matched),
    )


def pointing(distances: Floats) -> Pointing:
    """From (n, n) distances, [i, j] of reconstruction i to reference j; i's own is [i, i]."""
    own = np.diag(distances)[:, None]
    ranks = (distances <= own).sum(axis=1)  # the own one is among them
    return Pointing(Share(int((ranks == 1).sum()), len(ranks)), float((1 / ranks).mean()))


def shrink(images: Tensor) -> Tensor:
    """(n, C, H, W) with the longer side at most 64: means over areas, never enlarged."""
    height, width = images.shape[-2:]
    longer = max(height, width)
    if longer <= SIDE:
        return images
    size = tuple(max(1, round(side * SIDE / longer)) for side in (height, width))
    return torch.nn.functional.interpolate(images.float(), size=size, mode="area")


def embed(images: Tensor) -> Embedding:
    """The vectors of shrunk images (n, C, H, W) in [0, 1]."""
    small = shrink(images)
    pixels = small.double().flatten(1) / math.sqrt(small[0].numel())  # squared distances are MSE
    channels, height, width = small.shape[1:]
    if channels not in (1, 3) or min(height, width) < SMALLEST:
        return Embedding(pixels, None, None)
    parts = [_alexnet(chunk) for chunk in torch.split(small.float(), CHUNK)]
    layers, features = (torch.cat(column) for column in zip(*parts, strict=True))
    return Embedding(pixels, layers, torch.nn.functional.normalize(features))


def _alexnet(images: Tensor) -> tuple[Tensor, Tensor]:
    """(k, F) and (k, 256): LPIPS' layers as one vector, and the last layer's mean over space.

    LPIPS is Σ_layers mean_space Σ_c w_c (f_c - g_c)², so each layer times sqrt(w_c / HW) makes it
    a squared distance.
    """
    layers = alexnet_layers(images)
    vectors = []
    for layer, head in zip(layers, lpips_heads(), strict=True):
        unit = layer / (layer.square().sum(1, keepdim=True).sqrt() + 1e-10)
        vectors.append((unit * (head / unit[0, 0].numel()).sqrt()).flatten(1))
    return torch.cat(vectors, dim=1), layers[-1].mean((2, 3))


def _squared_distances(left: Tensor, right: Tensor) -> Floats:
    """(n, m) squared distances between rows, in the precision of the rows."""
    norms = left.square().sum(1)[:, None] + right.square().sum(1)
    return (norms - 2 * left @ right.T).clamp(min=0).double().numpy()


# patches ------------------------------------------------------------------------------------------


def matched_psnr(reconstructions: Tensor, references: Tensor, patch_size: int) -> Floats:
    """(n,) PSNR at full size after patches were matched one to one to those of the own image.

    The smallest possible error over all orders of patches: an upper bound for jigsaw solvers that
    does not use where patches were masked. inf where every patch is exact.
    """
    patches, own = (to_patches(x.double(), patch_size) for x in (reconstructions, references))
    everywhere = torch.ones(patches.shape[:2], dtype=torch.bool)
    placed = matched_patches(reconstructions, references, everywhere, patch_size)
    matched = own.gather(1, placed.unsqueeze(-1).expand_as(own))
    mse = (patches - matched).square().mean((1, 2))
    return (-10 * mse.log10()).numpy()


def matched_distances(reconstructions: Tensor, references: Tensor, patch_size: int) -> Floats:
    """(n, n) mean squared errors after matching patches, at most 64 pixels a side.

    Right where it decides a rank: up to the own distance. A reference that is certainly farther
    than the own one, because even its nearest patches are, keeps that lower bound.
    """
    if len(reconstructions) > MOST_MATCHED:
        raise ValueError(f"expected at most {MOST_MATCHED} images, got {len(reconstructions)}")
    left, right = (_small_patches(x, patch_size) for x in (reconstructions, references))
    distances = np.empty((len(left), len(right)))
    for i, patches in enumerate(left):
        own = _matched(_patch_errors(patches, right[i]))
        distances[i, i] = own
        for j in chain(range(i), range(i + 1, len(right))):
            errors = _patch_errors(patches, right[j])
            bound = max(_least(errors), _least(errors.T))
            distances[i, j] = bound if bound > own else _matched(errors)
    return distances


def _small_patches(images: Tensor, patch_size: int) -> Tensor:
    """(n, N, D) float64: each patch shrunk alone, so that no pixel mixes two patches."""
    patches = to_patches(images.double(), patch_size)
    across = max(images.shape[-2:]) // patch_size
    side = max(1, min(patch_size, SIDE // across))
    tiles = patches.reshape(-1, images.shape[1], patch_size, patch_size)
    small = torch.nn.functional.adaptive_avg_pool2d(tiles, side)
    return small.reshape(*patches.shape[:2], -1)


def _patch_errors(patches: Tensor, others: Tensor) -> Floats:
    """(N, N) mean squared error of each patch to each other one."""
    return _squared_distances(patches, others) / patches.shape[-1]


def _least(errors: Floats) -> float:
    """A bound that no matching is below: the least of each row, then of each column's rest."""
    of_rows = errors.min(axis=1, keepdims=True)
    return float(of_rows.mean() + (errors - of_rows).min(axis=0).mean())


def _matched(errors: Floats) -> float:
    rows, columns = linear_sum_assignment(errors)
    return float(errors[rows, columns].mean())
