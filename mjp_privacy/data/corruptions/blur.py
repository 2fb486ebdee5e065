"""Blur: out of focus, behind frosted glass, by motion, by zooming."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.signal import fftconvolve

from mjp_privacy.data.corruptions.noise import Picture

Plane = NDArray[np.float64]

DEFOCUS = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))
"""Radius of the disk, and how much its edge is softened, in pixels."""
GLASS = ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
"""σ of the blur before and after, longest step of a pixel, rounds."""
MOTION = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
"""Reach and σ of the trail, in pixels."""
ZOOM = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))
"""Below which factor the zooms end, and their step."""


def defocus_blur(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Every point becomes a disk with a soft edge; no chance is in it."""
    kernel = disk(*DEFOCUS[severity - 1])
    reach = kernel.shape[0] // 2
    wide = np.pad(picture, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    blurred: Picture = fftconvolve(wide, kernel[..., None], mode="valid", axes=(0, 1))
    return blurred


def disk(radius: int, softness: float) -> Plane:
    """A filled circle of sum 1; its edge is smoothed by a Gaussian of 3 or 5 taps."""
    reach = max(8, radius)
    places = np.arange(-reach, reach + 1)
    filled = (places[:, None] ** 2 + places[None, :] ** 2 <= radius**2).astype(np.float64)
    half = 1 if radius <= 8 else 2
    taps = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * softness**2))
    soft = filled / filled.sum()
    for axis in (0, 1):
        soft = ndimage.correlate1d(soft, taps / taps.sum(), axis, mode="mirror")
    return soft / soft.sum()


def glass_blur(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Pixels take the colour of a random near pixel, one after the other; blurred before and after.

    The official code means to swap two pixels, but its assignment between views of one array
    copies; its files are made by copying, so this does the same.
    """
    sigma, step, rounds = GLASS[severity - 1]
    height, width = picture.shape[:2]
    spread = (sigma, sigma, 0)
    pixels = np.floor(ndimage.gaussian_filter(picture, spread, mode="nearest") * 255) / 255
    rows, columns = (np.arange(side - step, step, -1) for side in (height, width))
    if not len(rows) or not len(columns):
        return pixels
    taken_from = list(range(height * width))
    places = (rows[:, None] * width + columns[None, :]).ravel()
    for _ in range(rounds):
        moves = rng.integers(-step, step, (len(places), 2))
        near = places + moves[:, 0] * width + moves[:, 1]
        for place, source in zip(places.tolist(), near.tolist(), strict=True):
            taken_from[place] = taken_from[source]
    scattered = pixels.reshape(-1, 3)[taken_from].reshape(picture.shape)
    blurred: Picture = ndimage.gaussian_filter(scattered, spread, mode="nearest")
    return blurred


def motion_blur(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """A trail behind every point, in a direction between -45 and 45 degrees."""
    return trail(picture, *MOTION[severity - 1], angle=rng.uniform(-45, 45))


def trail(picture: Plane, reach: int, sigma: float, *, angle: float) -> Plane:
    """One-sided Gaussian blur along a direction, by whole pixels as ImageMagick does; what would
    come from outside is taken from the edge. Works on (H, W) and (H, W, 3)."""
    length = 2 * reach + 1
    weights = np.exp(-(np.arange(length) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    down, right = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    height, width = picture.shape[:2]
    total = np.zeros_like(picture)
    for place, weight in enumerate(weights):
        rows = np.clip(np.arange(height) + round(place * down), 0, height - 1)
        columns = np.clip(np.arange(width) + round(place * right), 0, width - 1)
        total += weight * picture[rows[:, None], columns[None, :]]
    return total


def zoom_blur(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """The mean of the picture and of its zooms; no chance is in it."""
    end, step = ZOOM[severity - 1]
    zooms = [magnified(picture, float(factor)) for factor in np.arange(1, end, step)]
    return (picture + sum(zooms)) / (len(zooms) + 1)


def magnified(picture: Plane, factor: float) -> Plane:
    """The picture's middle, enlarged to the picture's size by linear interpolation."""
    sides = picture.shape[:2]
    crops = [math.ceil(side / factor) for side in sides]
    first = [(side - crop) // 2 for side, crop in zip(sides, crops, strict=True)]
    middle = picture[first[0] : first[0] + crops[0], first[1] : first[1] + crops[1]]
    scale = (factor, factor, 1)[: picture.ndim]
    large = ndimage.zoom(middle, scale, order=1)
    top, left = ((got - side) // 2 for got, side in zip(large.shape[:2], sides, strict=True))
    enlarged: Plane = large[top : top + sides[0], left : left + sides[1]]
    return enlarged
