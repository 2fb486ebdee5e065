"""Noise: Gaussian, shot (of few photons) and impulse (salt and pepper)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.float64]  # (H, W, 3) in [0, 1]

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
