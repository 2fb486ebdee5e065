"""FFT2D: cosine distance between the two-dimensional spectra of two images.

    |1 - <U, V> / sqrt(<U, U> <V, V>)|,   U and V the flattened FFTs,   in [0, 2]

The paper's score takes <U, V> = sum U V: its script passed complex vectors to SciPy's cosine, which
in 1.9 neither conjugated nor refused them, and cut the result to [0, 2]. The standard one takes
<U, V> = sum U conj(V). For real images u, v of H x W pixels both are sums over pixels (Parseval):

    sum U V       = H W sum_x u(x) v(-x)
    sum U conj(V) = H W sum_x u(x) v(x)

so no spectrum is computed, and H W cancels. The paper's score compares an image with the other's
point reflection on the periodic grid, relative to how much each image overlaps with its own; the
standard one is exactly the cosine distance of the pixels and says nothing about frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mjp_privacy.metrics.contract import Prepared
from mjp_privacy.metrics.pixel import overlap

ROUNDING = 1e-12
"""A product below this share of the images' energies is rounding error and counts as 0."""


@dataclass(frozen=True)
class SpectralCosine:
    """FFT2D as a measure.

    Where an image does not overlap with its own reflection, the paper's score is 2. 0/0 (for a
    black image, say), which SciPy leaves undefined, is 0 for identical images and 1 for others.
    """

    conjugate: bool
    precision: ClassVar[torch.dtype] = torch.float64

    def prepare(self, references: Tensor) -> Prepared:
        """The norms (m,) of the references, and their products with themselves."""
        return self._own(references, self._turned(references))

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """(m, C, H, W) twice, float64 -> (m,) float64 in [0, 2]."""
        turned = self._turned(reconstructions)
        norm, own = self._own(reconstructions, turned)
        reference_norm, reference_own = prepared
        shared = _rounded(overlap(turned, references), norm * reference_norm)
        cosine = shared / (own.sqrt() * reference_own.sqrt())
        if cosine.isnan().any():
            same = (reconstructions == references).flatten(1).all(1).double()
            cosine = torch.where(cosine.isnan(), same, cosine)
        return (1 - cosine).abs().clamp(max=2)

    def _turned(self, images: Tensor) -> Tensor:
        """What the pixels of the other image are multiplied with."""
        return images if self.conjugate else reflected(images)

    def _own(self, images: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        energy = overlap(images, images)
        own = energy if self.conjugate else overlap(images, turned)
        return energy.sqrt(), _rounded(own, energy)


def reflected(images: Tensor) -> Tensor:
    """v(-x) on the periodic grid: pixel (i, j) of v stands at (-i mod H, -j mod W)."""
    return images.flip(-2, -1).roll((1, 1), (-2, -1))


def _rounded(products: Tensor, scale: Tensor) -> Tensor:
    return torch.where(products > ROUNDING * scale, products, 0.0)
