"""Fits a prior to pictures. Only sums over all pictures are kept, no single picture."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from attacks.prior.gaussian import GaussianPrior, cosine_basis
from mjp_privacy.core.errors import UserError
from mjp_privacy.models.jigsaw import to_patches

BINS = 40
FEWEST_PATCHES = 4  # patches needed for each entry of a patch vector


def fit_prior(images: Iterable[Tensor], *, patch: int, size: int) -> GaussianPrior:
    """Mean colour, radial spectrum and patch covariance of images (3, size, size) in [0, 1].

    Patches are the tiles of each image and of its mirror image, as if left and right were alike.
    """
    moments, power = _Moments(), _Power(size)
    count = 0
    for image in images:
        patches = to_patches(image.double(), patch)
        mirrored = to_patches(image.double().flip(-1), patch)
        moments.add(torch.cat((patches, mirrored)))
        power.add(image.double())
        count += 1
    needed = FEWEST_PATCHES * 3 * patch * patch
    if moments.count < needed:
        raise UserError(
            f"A prior of {patch}×{patch} patches needs at least {needed} patches, got "
            f"{moments.count} from {count} image(s) of {size}×{size}: give more images."
        )
    mean, covariance = moments.result()
    colour = mean.unflatten(0, (3, -1)).mean(1)
    frequencies, spectrum = power.result(colour)
    description = f"fitted from {count} pictures at {size}×{size}"
    return GaussianPrior(description, colour, frequencies, spectrum, patch, mean, covariance)


class _Moments:
    """The sum of rows and of their outer products, which give mean and covariance."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor = torch.zeros(())
        self.products: Tensor = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        """Take in rows (k, p)."""
        self.count += len(rows)
        self.total = self.total + rows.sum(0)
        self.products = self.products + rows.mT @ rows

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean (p,) and covariance (p, p) of all rows taken in."""
        mean = self.total / self.count
        return mean, self.products / self.count - mean.outer(mean)


class _Power:
    """Products of DCT coefficients between channels, summed over images, then averaged in rings."""

    def __init__(self, size: int) -> None:
        self.basis = cosine_basis(size)
        index = torch.arange(size, dtype=torch.float64) / (2 * size)
        radius = (index.square().unsqueeze(0) + index.square().unsqueeze(1)).sqrt().flatten()
        self.radius = radius.clamp_min(0.25 / size)
        edges = torch.logspace(math.log10(0.3 / size), math.log10(0.75), BINS).double()
        self.ring = torch.bucketize(self.radius, edges).clamp_max(BINS - 1)
        self.total = torch.zeros(size * size, 3, 3, dtype=torch.float64)
        self.first = torch.zeros(3, dtype=torch.float64)
        self.size, self.count = size, 0

    def add(self, image: Tensor) -> None:
        """Take in an image (3, size, size)."""
        coefficients = (self.basis @ image @ self.basis.mT).flatten(1)  # (3, size^2)
        self.total += torch.einsum("cf,df->fcd", coefficients, coefficients)
        self.first += coefficients[:, 0]
        self.count += 1

    def result(self, colour: Tensor) -> tuple[Tensor, Tensor]:
        """Frequencies (F,) and spectrum (F, 3, 3); rings without a coefficient are left out."""
        power = self.total / self.count
        centre, first = colour * self.size, self.first / self.count
        power[0] -= first.outer(centre) + centre.outer(first) - centre.outer(centre)
        counts = torch.zeros(BINS, dtype=torch.float64).index_add_(
            0, self.ring, torch.ones_like(self.radius)
        )
        logs = torch.zeros(BINS, dtype=torch.float64).index_add_(0, self.ring, self.radius.log())
        sums = torch.zeros(BINS, 3, 3, dtype=torch.float64).index_add_(0, self.ring, power)
        filled = counts > 0
        frequencies = (logs[filled] / counts[filled]).exp()
        return frequencies, sums[filled] / counts[filled].view(-1, 1, 1)
