"""FFT2D: cosine distance between the two-dimensional spectra of two images."""

import torch
from torch import Tensor

ROUNDING = 1e-12
"""A product of spectra below this share of their energies is rounding error and counts as 0."""


def fft2d(reconstructions: Tensor, references: Tensor, *, conjugate: bool) -> Tensor:
    """|1 - <U, V> / sqrt(<U, U> <V, V>)|, U and V the flattened FFTs. -> (m,) float64 in [0, 2].

    `conjugate=False` takes <U, V> = sum U V, the paper's score: its script passed complex vectors
    to SciPy's cosine, which in 1.9 neither conjugated nor refused them, and cut the result to
    [0, 2]. That product is H W sum_x u(x) v(-x): it compares an image with the other's point
    reflection, relative to how much each image overlaps with its own.

    `conjugate=True` takes <U, V> = sum U conj(V) = H W sum_x u(x) v(x) (Parseval): exactly the
    cosine distance of the pixels. It says nothing about frequencies.

    Where an image does not overlap with its own reflection, the paper's score is 2. 0/0 (for a
    black image, say), which SciPy leaves undefined, is 0 for identical images and 1 for others.
    """
    u = torch.fft.fft2(reconstructions.double()).flatten(1)
    v = torch.fft.fft2(references.double()).flatten(1)

    def product(a: Tensor, b: Tensor) -> Tensor:
        # The spectra of real images are Hermitian: the imaginary parts cancel in the sum.
        total = (a * (b.conj() if conjugate else b)).sum(1).real
        scale = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
        return torch.where(total > ROUNDING * scale, total, 0.0)

    cosine = product(u, v) / (product(u, u).sqrt() * product(v, v).sqrt())
    cosine = torch.where(cosine.isnan(), (u == v).all(1).double(), cosine)
    return (1 - cosine).abs().clamp(max=2)
