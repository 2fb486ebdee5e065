"""A stationary Gaussian field of natural pictures, and the patches cut from it.

The field is known by its mean colour and its radial spectrum S(f): the covariance of the colour
channels at each spatial frequency f (cycles per pixel), which is that of an orthonormal DCT's
coefficients. A prior fitted from pictures also holds the exact covariance of its patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mjp_privacy.interfaces import Pixels

JITTER = 1e-8  # relative; keeps inverses finite where a fitted covariance is nearly singular


@dataclass(frozen=True)
class GaussianPrior:
    """A prior over pictures with colours in [0, 1]; float64.

    C channels, F frequencies, p = C * patch * patch. Without `patch_mean` and `patch_covariance`
    those of a patch follow from the field.
    """

    description: str
    mean: Tensor  # (C,)
    frequencies: Tensor  # (F,) ascending, cycles per pixel
    spectrum: Tensor  # (F, C, C)
    patch_size: int | None = None
    patch_mean: Tensor | None = None  # (p,), channel first
    patch_covariance: Tensor | None = None  # (p, p)

    @property
    def fitted_size(self) -> float:
        """Side in pixels of the pictures that the spectrum was fitted on: its first knot, the
        constant, stands at a quarter of their lowest frequency's step."""
        return 0.25 / float(self.frequencies[0])

    def field_spectrum(self, size: int, pixels: Pixels) -> Tensor:
        """(size, size, C, C): covariance of every DCT coefficient of a normalised image."""
        index = torch.arange(size, dtype=torch.float64) / (2 * size)
        radius = (index.square().unsqueeze(0) + index.square().unsqueeze(1)).sqrt()
        return _scaled(self._at(radius), pixels)

    def mean_colour(self, pixels: Pixels) -> Tensor:
        """The mean colour (C,) in the model's normalised space."""
        mean, std = _moments(pixels)
        return (self.mean - mean) / std

    def patch(self, patch_size: int, pixels: Pixels) -> tuple[Tensor, Tensor]:
        """Mean (p,) and covariance (p, p) of a normalised patch, channel first."""
        mean, std = _moments(pixels)
        area = patch_size * patch_size
        if self.patch_mean is not None and self.patch_size == patch_size:
            assert self.patch_covariance is not None
            centre, covariance = self.patch_mean, self.patch_covariance
        else:
            centre, covariance = self.mean.repeat_interleave(area), self._stationary(patch_size)
        scale = std.repeat_interleave(area)
        return (centre - mean.repeat_interleave(area)) / scale, covariance / scale.outer(scale)

    def _at(self, radius: Tensor) -> Tensor:
        """S (..., C, C) at frequencies (...), by interpolating its matrix logarithm in log f."""
        log_radius = radius.clamp(float(self.frequencies[0]), float(self.frequencies[-1])).log()
        knots = self.frequencies.log()
        right = torch.searchsorted(knots, log_radius).clamp(1, len(knots) - 1)
        share = (log_radius - knots[right - 1]) / (knots[right] - knots[right - 1])
        values, vectors = torch.linalg.eigh(self.spectrum)
        logs = vectors @ torch.diag_embed(values.clamp_min(1e-300).log()) @ vectors.mT
        share = share[..., None, None]
        return torch.linalg.matrix_exp((1 - share) * logs[right - 1] + share * logs[right])

    def _stationary(self, patch_size: int) -> Tensor:
        """(p, p) covariance of a patch of the field, from the spectrum on a large torus."""
        side = 16 * patch_size
        index = torch.fft.fftfreq(side, dtype=torch.float64)
        radius = (index.square().unsqueeze(0) + index.square().unsqueeze(1)).sqrt()
        correlation = torch.fft.ifft2(self._at(radius), dim=(0, 1)).real  # (side, side, C, C)
        place = torch.arange(patch_size)
        shift = place.unsqueeze(1) - place.unsqueeze(0)  # (P, P), between two pixels of one axis
        rows = shift[:, None, :, None].expand(-1, patch_size, -1, patch_size)
        columns = shift[None, :, None, :].expand(patch_size, -1, patch_size, -1)
        area = patch_size * patch_size
        blocks = correlation[rows.reshape(area, area), columns.reshape(area, area)]
        channels = len(self.mean)
        return blocks.permute(2, 0, 3, 1).reshape(channels * area, channels * area)


def _moments(pixels: Pixels) -> tuple[Tensor, Tensor]:
    """The model's mean and std of each channel (C,), float64."""
    return torch.tensor(pixels.mean).double(), torch.tensor(pixels.std).double()


def _scaled(covariance: Tensor, pixels: Pixels) -> Tensor:
    """A covariance (..., C, C) of colours in [0, 1], in the model's normalised space."""
    std = _moments(pixels)[1]
    return covariance / std.outer(std)


def cosine_basis(size: int) -> Tensor:
    """(size, size) orthonormal DCT-II: row k is the k-th basis function."""
    index = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi * (index + 0.5) * index.unsqueeze(1) / size) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis
