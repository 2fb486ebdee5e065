"""The 15 common corruptions of ImageNet-C, at five severities, for pictures of one's own.

After Hendrycks and Dietterich, “Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations” (ICLR 2019), with the constants of the official generator. Written anew over NumPy,
SciPy and Pillow, so no picture equals the official file's: DIFFERENCES in `image_sets.py`
says where they differ.

    pixels = corrupted(pixels, "fog", 3, np.random.default_rng(0))  # (H, W, 3) uint8 to the same
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from scipy.signal import fftconvolve

from mjp_privacy.data.decoding import decode_image

# Noise: Gaussian, shot (of few photons) and impulse (salt and pepper) -----------------------------

Picture = NDArray[np.float64]  # (H, W, 3) in [0, 1], or a plane (H, W)

GAUSSIAN = (0.08, 0.12, 0.18, 0.26, 0.38)
"""Standard deviations by severity."""
PHOTONS = (60, 25, 12, 5, 3)
"""How many photons a white value stands for: the fewer, the noisier."""
IMPULSES = (0.03, 0.06, 0.09, 0.17, 0.27)
"""Shares of values that become black or white."""


def gaussian_noise(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Normal noise on every value."""
    return picture + rng.normal(0, GAUSSIAN[severity - 1], picture.shape)


def shot_noise(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Each value as a Poisson count of photons."""
    photons = PHOTONS[severity - 1]
    return rng.poisson(picture * photons) / photons


def impulse_noise(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """A share of all values, channels apart, set to 0 or 1 with equal chance."""
    struck = rng.random(picture.shape) < IMPULSES[severity - 1]
    white = rng.random(picture.shape) < 0.5
    return np.where(struck, white.astype(np.float64), picture)


# Blur: out of focus, behind frosted glass, by motion, by zooming ----------------------------------

DEFOCUS = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))
"""Radius of the disk, and how much its edge is softened, in pixels."""
GLASS = ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
"""σ of the blur before and after, longest step of a pixel, rounds."""
MOTION = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
"""Reach and σ of the trail, in pixels."""
ZOOM = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))
"""Below which factor the zooms end, and their step."""


def defocus_blur(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Every point becomes a disk of sum 1; its edge is smoothed by a Gaussian of 3 or 5 taps."""
    radius, softness = DEFOCUS[severity - 1]
    reach = max(8, radius)
    places = np.arange(-reach, reach + 1)
    filled = (places[:, None] ** 2 + places[None, :] ** 2 <= radius**2).astype(np.float64)
    half = 1 if radius <= 8 else 2
    taps = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * softness**2))
    disk = filled / filled.sum()
    for axis in (0, 1):
        disk = ndimage.correlate1d(disk, taps / taps.sum(), axis, mode="mirror")
    disk /= disk.sum()
    wide = np.pad(picture, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    blurred: Picture = fftconvolve(wide, disk[..., None], mode="valid", axes=(0, 1))
    return blurred


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


def trail(picture: Picture, reach: int, sigma: float, *, angle: float) -> Picture:
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
    """The mean of the picture and of its zooms."""
    end, step = ZOOM[severity - 1]
    zooms = [magnified(picture, float(factor)) for factor in np.arange(1, end, step)]
    return (picture + sum(zooms)) / (len(zooms) + 1)


def magnified(picture: Picture, factor: float) -> Picture:
    """The picture's middle, enlarged to the picture's size by linear interpolation."""
    sides = picture.shape[:2]
    crops = [math.ceil(side / factor) for side in sides]
    first = [(side - crop) // 2 for side, crop in zip(sides, crops, strict=True)]
    middle = picture[first[0] : first[0] + crops[0], first[1] : first[1] + crops[1]]
    scale = (factor, factor, 1)[: picture.ndim]
    large = ndimage.zoom(middle, scale, order=1)
    top, left = ((got - side) // 2 for got, side in zip(large.shape[:2], sides, strict=True))
    enlarged: Picture = large[top : top + sides[0], left : left + sides[1]]
    return enlarged


# Weather: snow, frost, fog, bright light ----------------------------------------------------------


def plasma(shape: tuple[int, ...], decay: float, rng: np.random.Generator) -> Picture:
    """A cloud in [0, 1] by diamonds and squares on a torus, cut to the shape.

    decay: each halving of the scale divides the chance by its square
    """
    side = 1 << max(1, (max(shape) - 1).bit_length())
    cloud: Picture = np.zeros((1, 1))
    chance = 1.0
    while cloud.shape[0] < side:
        cloud = _finer(cloud, chance, rng)
        chance /= decay**2
    cloud -= cloud.min()
    return (cloud / cloud.max())[: shape[0], : shape[1]]


def _finer(coarse: Picture, chance: float, rng: np.random.Generator) -> Picture:
    """Twice as many points each way: between them the mean of four neighbours, and chance."""
    size = coarse.shape[0]

    def with_chance(neighbours: Picture) -> Picture:
        return neighbours / 4 + chance * rng.uniform(-1, 1, neighbours.shape)

    below = np.roll(coarse, -1, 0)
    centres = with_chance(coarse + below + np.roll(coarse + below, -1, 1))
    to_the_right = with_chance(coarse + np.roll(coarse, -1, 1) + centres + np.roll(centres, 1, 0))
    underneath = with_chance(coarse + below + centres + np.roll(centres, 1, 1))
    fine = np.empty((2 * size, 2 * size))
    fine[::2, ::2], fine[1::2, 1::2] = coarse, centres
    fine[::2, 1::2], fine[1::2, ::2] = to_the_right, underneath
    return fine


SNOW = (
    (0.1, 0.3, 3.0, 0.5, 10, 4, 0.8),
    (0.2, 0.3, 2.0, 0.5, 12, 4, 0.7),
    (0.55, 0.3, 4.0, 0.9, 12, 8, 0.7),
    (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
    (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
)
"""Mean and σ of the flakes' noise, its zoom, what falls below is no flake, reach and σ of the
trail, the picture's share."""
FROST = ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
"""Shares of the picture and of the frost."""
CRYSTALS = 5
"""Directions in which needles of ice grow."""
ICE = (0.50, 0.56, 0.62)
"""Mean colour of the frost: a bluish grey."""
FOG = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))
"""Thickness, and by how much finer structure is fainter."""
BRIGHTNESS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""What is added to the largest channel."""

GREY = (0.299, 0.587, 0.114)


def snow(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Flakes with trails, over a picture that is whitened."""
    mean, sigma, zoom, least, reach, blur, share = SNOW[severity - 1]
    flakes = magnified(rng.normal(mean, sigma, picture.shape[:2]), zoom)
    flakes = np.floor(np.clip(np.where(flakes < least, 0, flakes), 0, 1) * 255) / 255
    falling = trail(flakes, int(reach), blur, angle=rng.uniform(-135, -45))[..., None]
    grey = (picture @ np.array(GREY))[..., None]
    white = np.maximum(picture, 1.5 * grey + 0.5)
    snowing: Picture = share * picture + (1 - share) * white + falling
    snowing += np.rot90(falling, 2)
    return snowing


def frost(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Ice on the pane: needles in a few directions, dense where a cloud is thick.

    The official code adds photographs of frost, with which this texture shares no more than being
    bright, bluish and streaked.
    """
    kept, added = FROST[severity - 1]
    shape = picture.shape[:2]
    needles: Picture = np.zeros(shape)
    for _ in range(CRYSTALS):
        seeds = (rng.random(shape) < 0.03) * rng.random(shape)
        reach = int(rng.integers(8, 20))
        needles = np.maximum(needles, 8 * trail(seeds, reach, reach, angle=rng.uniform(0, 360)))
    thickness = plasma(shape, 1.6, rng)
    ice = np.clip(0.35 * thickness + thickness * needles, 0, None)
    colour = ice[..., None] * np.array(ICE) / ice.mean()
    return kept * picture + added * np.clip(colour, 0, 1)


def fog(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """A cloud added to the picture, the sum made as bright as the picture was."""
    thickness, decay = FOG[severity - 1]
    brightest = picture.max()
    cloud = thickness * plasma(picture.shape[:2], decay, rng)
    return (picture + cloud[..., None]) * brightest / (brightest + thickness)


def brightness(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """The value of HSV raised, hue and saturation kept."""
    value = picture.max(-1, keepdims=True)
    raised = np.minimum(value + BRIGHTNESS[severity - 1], 1)
    return np.where(value > 0, picture / np.where(value > 0, value, 1) * raised, raised)


# Digital: contrast, elastic transform, large pixels, JPEG -----------------------------------------

CONTRAST = (0.4, 0.3, 0.2, 0.1, 0.05)
"""What is left of the distance from each channel's mean."""
ELASTIC = (
    (2.0, 0.7, 0.1),
    (2.0, 0.08, 0.2),
    (0.05, 0.01, 0.02),
    (0.07, 0.01, 0.02),
    (0.12, 0.01, 0.02),
)
"""Strength and σ of the bending, reach of the corners' moves: in shares of the unit below."""
UNIT = 244 / 224
"""The official code writes 244 pixels for a side of 224; here it grows with the side."""
PIXELS = (0.6, 0.5, 0.4, 0.3, 0.25)
"""Side of the small picture, as a share."""
JPEG = (25, 18, 15, 10, 7)
"""Pillow's quality."""


def contrast(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Every channel drawn towards its mean."""
    means = picture.mean((0, 1), keepdims=True)
    return (picture - means) * CONTRAST[severity - 1] + means


def elastic_transform(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Three corners of a square moved at random, then every pixel along a smooth random field.

    The severities are two kinds: 1 and 2 move the whole picture far, 3 to 5 bend it finely.
    """
    unit = UNIT * min(picture.shape[:2])
    strength, sigma, reach = (unit * share for share in ELASTIC[severity - 1])
    skewed = _skewed(picture, reach, rng)
    rows, columns = np.indices(picture.shape[:2], dtype=np.float64)
    bends = []
    for _ in range(2):
        noise = rng.uniform(-1, 1, rows.shape)
        smooth = ndimage.gaussian_filter(noise, sigma, mode="reflect", truncate=3)
        bends.append(smooth * strength)
    return _taken_at(skewed, rows + bends[0], columns + bends[1], "reflect")


def _skewed(picture: Picture, reach: float, rng: np.random.Generator) -> Picture:
    """The picture under the affine map that takes three corners of its middle third elsewhere."""
    height, width = picture.shape[:2]
    middle = np.array([height // 2, width // 2], dtype=np.float64)
    third = min(height, width) // 3
    corners = middle + third * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + rng.uniform(-reach, reach, corners.shape)
    # rows of (row, column, 1) at the new places, times the map, are the old places
    back, *_ = np.linalg.lstsq(np.column_stack([moved, np.ones(3)]), corners, rcond=None)
    rows, columns = np.indices((height, width), dtype=np.float64)
    old_rows, old_columns = (
        rows * back[0, axis] + columns * back[1, axis] + back[2, axis] for axis in (0, 1)
    )
    return _taken_at(picture, old_rows, old_columns, "mirror")


def _taken_at(picture: Picture, rows: Picture, columns: Picture, mode: str) -> Picture:
    """The picture's values at these places, by linear interpolation."""
    channels = [
        ndimage.map_coordinates(picture[..., channel], (rows, columns), order=1, mode=mode)
        for channel in range(picture.shape[2])
    ]
    return np.stack(channels, axis=-1)


def pixelate(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Made smaller by means of boxes, and large again."""
    height, width = picture.shape[:2]
    share = PIXELS[severity - 1]
    small = (max(1, int(width * share)), max(1, int(height * share)))
    image = Image.fromarray(_bytes(picture)).resize(small, Image.Resampling.BOX)
    return _values(image.resize((width, height), Image.Resampling.BOX))


def jpeg_compression(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Written as JPEG of low quality and read again."""
    stream = io.BytesIO()
    Image.fromarray(_bytes(picture)).save(stream, "JPEG", quality=JPEG[severity - 1])
    return _values(decode_image(stream.getvalue()))


def _bytes(picture: Picture) -> NDArray[np.uint8]:
    return np.rint(picture * 255).astype(np.uint8)


def _values(image: Image.Image) -> Picture:
    return np.asarray(image.convert("RGB"), dtype=np.float64) / 255


# All of them, and one picture under one -----------------------------------------------------------

Corruption = Callable[[Picture, int, np.random.Generator], Picture]

FAMILIES: Mapping[str, tuple[Corruption, ...]] = {
    "noise": (gaussian_noise, shot_noise, impulse_noise),
    "blur": (defocus_blur, glass_blur, motion_blur, zoom_blur),
    "weather": (snow, frost, fog, brightness),
    "digital": (contrast, elastic_transform, pixelate, jpeg_compression),
}
"""In the paper's order, by the official archive that holds them. Its fifth, `extra`, counts towards
no mean."""

BY_NAME = {function.__name__: function for family in FAMILIES.values() for function in family}
CORRUPTIONS = tuple(BY_NAME)
SEVERITIES = (1, 2, 3, 4, 5)


def corrupted(
    pixels: NDArray[np.uint8], corruption: str, severity: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """The picture under a corruption: corrupted(pixels, "fog", 3, np.random.default_rng(0)).

    pixels (H, W, 3); what leaves [0, 1] is cut off and 8-bit values are rounded down, as the
    official code does.
    """
    picture = pixels.astype(np.float64) / 255
    changed = BY_NAME[corruption](picture, severity, rng)
    return np.floor(np.clip(changed, 0, 1) * 255 + 1e-9).astype(np.uint8)
