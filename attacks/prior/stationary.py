"""A prior that needs no data: grey on average, neighbouring pixels and channels correlated.

Covariance of two pixels at distance d in channels c and c':

    SPREAD^2 * exp(-d / length) * (1 if c == c' else CHANNELS),   length = size / 8,

whose spectrum in two dimensions is 2 pi l^2 / (1 + (2 pi l f)^2)^(3/2). The three numbers are
round figures; none was tuned on pictures that are attacked.
"""

from __future__ import annotations

import math

import torch

from attacks.prior.gaussian import GaussianPrior

GREY, SPREAD, CHANNELS = 0.5, 0.25, 0.9
LENGTHS = 8  # correlation lengths that fit in a picture's side
KNOTS = 64


def stationary_prior(size: int, channels: int = 3) -> GaussianPrior:
    """The stationary prior for pictures of `size` pixels a side."""
    length = size / LENGTHS
    frequencies = torch.logspace(math.log10(0.25 / size), math.log10(0.75), KNOTS).double()
    power = 2 * math.pi * length**2 / (1 + (2 * math.pi * length * frequencies) ** 2) ** 1.5
    colours = torch.full((channels, channels), CHANNELS).double()
    colours.fill_diagonal_(1.0)
    return GaussianPrior(
        description=f"stationary, no data (length {length:g} pixels, channels {CHANNELS:g})",
        mean=torch.full((channels,), GREY).double(),
        frequencies=frequencies,
        spectrum=SPREAD**2 * power[:, None, None] * colours,
    )
