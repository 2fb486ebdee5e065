"""How unlike a photograph a patch is, without any image to learn from.

Grey levels 0...255, patches (n, C*P*P), C = 3 or 1. The constants are the usual power law of
photographs, std ~ A f^-1.6 per DCT coefficient of the opponent colours at f cycles a pixel,
rounded. The constants were read off photographs of classes that leave 1 modulo 5, which are not
attacked; nothing else of any data set enters.
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
GREY = 116.0
LEVEL = 0.3  # grey levels: rounding
GRADIENT = 0.3
OUTSIDE = 5.0


@cache
def _basis(length: int, patch_size: int) -> tuple[Reals, Reals, Reals]:
    """Orthonormal colour DCT (p, p), and the two scales (p,) of its coefficients."""
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
    """(p, p) inverse covariance of a patch in grey levels."""
    basis, spread, _ = _basis(length, patch_size)
    return (basis.T / spread**2) @ basis


def outside(patches: Reals) -> Reals:
    """(n,) grey levels by which pixels leave 0...255."""
    return (np.maximum(-patches, 0) + np.maximum(patches - 255, 0)).sum(-1)


def gradient_cost(patches: Reals, patch_size: int) -> Reals:
    """(n,) sum of log(1 + |difference of neighbouring pixels|): sparse in photographs."""
    channels = patches.shape[-1] // patch_size**2
    tiles = patches.reshape(-1, channels, patch_size, patch_size)
    sideways = np.log1p(abs(np.diff(tiles, axis=-1))).sum((1, 2, 3))
    return sideways + np.log1p(abs(np.diff(tiles, axis=-2))).sum((1, 2, 3))


def patch_cost(patches: Reals, patch_size: int) -> Reals:
    """(n,) heavy-tailed DCT coefficients, sparse gradients, and the box."""
    basis, _, typical = _basis(patches.shape[-1], patch_size)
    waves = np.log1p(((patches - GREY) @ (basis.T / typical)) ** 2).sum(-1)
    return waves + GRADIENT * gradient_cost(patches, patch_size) + OUTSIDE * outside(patches)
