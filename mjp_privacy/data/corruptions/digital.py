"""Digital: contrast, elastic transform, large pixels, JPEG."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from mjp_privacy.data.corruptions.noise import Picture
from mjp_privacy.data.decoding import decode_image

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
    """Every channel drawn towards its mean; no chance is in it."""
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
    bends = [_smooth_field(rows.shape, sigma, rng) * strength for _ in range(2)]
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


def _smooth_field(
    shape: tuple[int, ...], sigma: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Uniform noise from -1 to 1, smoothed."""
    field: NDArray[np.float64] = ndimage.gaussian_filter(
        rng.uniform(-1, 1, shape), sigma, mode="reflect", truncate=3
    )
    return field


def _taken_at(
    picture: Picture, rows: NDArray[np.float64], columns: NDArray[np.float64], mode: str
) -> Picture:
    """The picture's values at these places, by linear interpolation."""
    channels = [
        ndimage.map_coordinates(picture[..., channel], (rows, columns), order=1, mode=mode)
        for channel in range(picture.shape[2])
    ]
    return np.stack(channels, axis=-1)


def pixelate(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Made smaller by means of boxes, and large again; no chance is in it."""
    height, width = picture.shape[:2]
    share = PIXELS[severity - 1]
    small = (max(1, int(width * share)), max(1, int(height * share)))
    image = Image.fromarray(_bytes(picture)).resize(small, Image.Resampling.BOX)
    return _values(image.resize((width, height), Image.Resampling.BOX))


def jpeg_compression(picture: Picture, severity: int, rng: np.random.Generator) -> Picture:
    """Written as JPEG of low quality and read again; no chance is in it."""
    stream = io.BytesIO()
    Image.fromarray(_bytes(picture)).save(stream, "JPEG", quality=JPEG[severity - 1])
    return _values(decode_image(stream.getvalue()))


def _bytes(picture: Picture) -> NDArray[np.uint8]:
    return np.rint(picture * 255).astype(np.uint8)


def _values(image: Image.Image) -> Picture:
    return np.asarray(image.convert("RGB"), dtype=np.float64) / 255
