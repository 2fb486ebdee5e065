"""FFT2D: cosine distance between the two-dimensional spectra of two images."""

import torch
from torch import Tensor

EMPTY = 1e-12
"""A spectrum whose product with itself is below this share of its energy has no direction."""


def fft2d(reconstructions: Tensor, references: Tensor, *, conjugate: bool) -> Tensor:
    """|1 - <U, V> / sqrt(<U, U> <V, V>)|, U and V the flattened FFTs. -> (m,) float64 in [0, 2].

    `conjugate=False` takes <U, V> = sum U V, the paper's score: its script passed complex vectors
    to SciPy's cosine, which in 1.9 neither conjugated nor refused them, and cut the result to
    [0, 2]. That product is H W sum_x u(x) v(-x): it compares an image with the other's point
    reflection, in units of how much each overlaps with its own.

    `conjugate=True` takes <U, V> = sum U conj(V) = H W sum_x u(x) v(x) (Parseval): exactly the
    cosine distance of the pixels. It holds no information about frequencies.

    0/0 (a black image, say) is 0 for identical images and 1, nothing in common, for others.
    """
    u = torch.fft.fft2(reconstructions.double()).flatten(1)
    v = torch.fft.fft2(references.double()).flatten(1)

    def product(a: Tensor, b: Tensor) -> Tensor:
        # The spectra of real images are Hermitian: the imaginary parts cancel in the sum.
        return (a * (b.conj() if conjugate else b)).sum(1).real

    uu, vv = product(u, u), product(v, v)
    energy_u, energy_v = u.abs().square().sum(1), v.abs().square().sum(1)
    defined = (uu > EMPTY * energy_u) & (vv > EMPTY * energy_v)
    distance = (1 - product(u, v) / (uu.sqrt() * vv.sqrt())).abs().clamp(max=2)
    return torch.where(defined, distance, 1 - (u == v).all(1).double())
