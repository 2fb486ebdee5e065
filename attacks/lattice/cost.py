"""Costs that say how unlike a photograph a patch is, from a few constants and no images.

Patches are (n, C*P*P) in grey levels, C = 3 or 1; their range 0...255 is called the box. The
constants are the usual power law of photographs, std ~ A f^-1.6 per DCT coefficient of the opponent
colours at f cycles per pixel, rounded. They were read off photographs of classes whose number is 1
modulo 5, which are not attacked; nothing else is taken from any data set.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct

Reals = NDArray[np.float64]
EXPONENT = -1.6
SPREAD = (10.0, 2.8, 1.1)  # A of the standard deviation, by opponent colour
TYPICAL = (3.3, 0.55, 0.2)  # A of the median magnitude
GREY = 116.0  # mean grey level
LEVEL = 0.3  # grey levels of rounding, added to the typical magnitude
GRADIENT = 0.3  # weight of the gradients' cost
OUTSIDE = 5.0  # cost of a grey level outside the box


def waves_of(length: int, patch_size: int) -> tuple[Reals, Reals]:
    """Orthonormal colour DCT (p, p), and the typical size (p,) of its coefficients."""
    basis, _, typical = _basis(length, patch_size)
    return basis, typical


@cache
def _basis(length: int, patch_size: int) -> tuple[Reals, Reals, Reals]:
    """Orthonormal colour DCT (p, p), and the std and typical size (p,) of its coefficients."""
    channels = length // patch_size**2
    colours = (
        np.array([[1.0, 1, 1], [1, 0, -1], [-1, 2, -1]]) if channels == 3 else np.eye(channels)
    )
    colours /= np.linalg.norm(colours, axis=1, keepdims=True)
    waves = dct(np.eye(patch_size), norm="ortho", axis=0)
    basis = np.einsum("cd,ui,vj->cuvdij", colours, waves, waves).reshape(length, length)
    index = np.arange(patch_size)
    frequency = np.hypot(index[:, None], index)
    frequency[0, 0] = 0.7
    law = (frequency / patch_size) ** EXPONENT
    spread = np.multiply.outer(np.resize(SPREAD, channels), law).ravel() + 1
    typical = np.multiply.outer(np.resize(TYPICAL, channels), law).ravel() + LEVEL
    return basis, spread, typical


def precision(length: int, patch_size: int) -> Reals:
    """The inverse covariance (p, p) of a patch in grey levels."""
    basis, spread, _ = _basis(length, patch_size)
    return (basis.T / spread**2) @ basis


def outside(patches: Reals) -> Reals:
    """The sum of grey levels by which a patch's pixels leave 0...255, (n,)."""
    return (np.maximum(-patches, 0) + np.maximum(patches - 255, 0)).sum(-1)


def gradient_cost(patches: Reals, patch_size: int) -> Reals:
    """The sum of log(1 + |difference of neighbouring pixels|), (n,): low for photographs."""
    channels = patches.shape[-1] // patch_size**2
    tiles = patches.reshape(-1, channels, patch_size, patch_size)
    sideways = np.log1p(abs(np.diff(tiles, axis=-1))).sum((1, 2, 3))
    return sideways + np.log1p(abs(np.diff(tiles, axis=-2))).sum((1, 2, 3))


def patch_cost(patches: Reals, patch_size: int) -> Reals:
    """The whole cost (n,): heavy-tailed DCT coefficients, sparse gradients, pixels in the box."""
    basis, _, typical = _basis(patches.shape[-1], patch_size)
    waves = np.log1p(((patches - GREY) @ (basis.T / typical)) ** 2).sum(-1)
    return waves + GRADIENT * gradient_cost(patches, patch_size) + OUTSIDE * outside(patches)
