r"""The most probable picture among those that agree with what is known about each patch.

Patches are x_i = known_i + a_i B. The picture is a Gaussian field with mean colour m and a
precision Sigma^-1 that an orthonormal DCT diagonalises; a is chosen to minimise its energy

    E(a) = (x(a) - m)^T Sigma^-1 (x(a) - m)

by conjugate gradients in a (N, q). The energy joins patches across their borders: on the unmasked
region of twelve development pictures that gave 23.8 dB, a prior for each patch alone 19.5. Total
variation, hyper-Laplacian and scale mixtures on top of it were worse. On a CPU the DCT is SciPy's,
whose cost grows as n log n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attacks.budget import spent
from attacks.equations.span import Knowledge
from attacks.prior import find_prior
from attacks.prior.gaussian import JITTER, GaussianPrior, cosine_basis
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import to_images, to_patches

TOLERANCE = 1e-4  # share of the first residual's norm at which to stop
STEPS = 300


@dataclass(frozen=True)
class FieldEnergy:
    """Sigma^-1 of a normalised picture of `size` pixels a side under a prior."""

    precision: Tensor  # (C, C, size, size), of each DCT coefficient
    basis: Tensor  # (size, size), of the DCT
    mean: Tensor  # (C,)
    patch_precision: Tensor  # (p, p), of a patch alone: the preconditioner
    patch_size: int

    @classmethod
    def of(cls, prior: GaussianPrior, patch_size: int, pixels: Pixels) -> FieldEnergy:
        """The energy for the model's picture size, with enough jitter to be invertible."""
        spectrum = prior.field_spectrum(pixels.size, pixels)
        least = JITTER * float(spectrum.diagonal(dim1=-2, dim2=-1).mean())
        eye = torch.eye(spectrum.shape[-1], dtype=spectrum.dtype)
        covariance = prior.patch(patch_size, pixels)[1]
        ridge = JITTER * float(covariance.diagonal().mean())
        return cls(
            torch.linalg.inv(spectrum + least * eye).permute(2, 3, 0, 1).contiguous(),
            cosine_basis(pixels.size),
            prior.mean_colour(pixels),
            torch.linalg.inv(covariance + ridge * torch.eye(len(covariance)).double()),
            patch_size,
        )

    def on(self, device: torch.device) -> FieldEnergy:
        """The same on another device."""
        return FieldEnergy(
            self.precision.to(device),
            self.basis.to(device),
            self.mean.to(device),
            self.patch_precision.to(device),
            self.patch_size,
        )

    def force(self, patches: Tensor) -> Tensor:
        """Sigma^-1 applied to a picture given as patches (N, p), as patches."""
        picture = to_images(patches, self.patch_size, len(self.mean))
        shaped = (self.precision * self._transformed(picture)).sum(1)
        return to_patches(self._transformed(shaped, back=True), self.patch_size)

    def _transformed(self, picture: Tensor, *, back: bool = False) -> Tensor:
        """The orthonormal DCT of a picture (C, size, size), or its inverse."""
        if picture.device.type == "cpu":
            from scipy.fft import dctn

            kind = 3 if back else 2
            return torch.from_numpy(dctn(picture.numpy(), kind, axes=(1, 2), norm="ortho"))
        left = self.basis.mT if back else self.basis
        return left @ picture @ left.mT


@lru_cache(maxsize=4)
def field_energy(prior: str, patch_size: int, pixels: Pixels) -> FieldEnergy:
    """The energy under the prior of this name, made once for all pictures of a size."""
    found = find_prior(prior, patch=patch_size, size=pixels.size)
    return FieldEnergy.of(found, patch_size, pixels)


def complete(
    knowledge: Knowledge,
    energy: FieldEnergy,
    kept: Tensor | None = None,
    exact: Tensor | None = None,
) -> Tensor:
    """All patches (N, p) of the most probable picture, normalised; those `kept` (N,) are taken from
    `exact` (N, p)."""
    known, basis = knowledge.known, knowledge.basis
    if not len(basis):
        return known
    energy = energy.on(known.device)
    area = energy.patch_size**2
    centre = energy.mean.repeat_interleave(area)
    start, free = (centre - known) @ basis.mT, known.new_ones(len(known), 1)
    if kept is not None and exact is not None:
        known = torch.where(kept.unsqueeze(1), exact, known)
        free = (~kept).unsqueeze(1).to(known)
        start = start * free
    preconditioner = torch.linalg.inv(basis @ energy.patch_precision @ basis.mT)

    def apply(a: Tensor) -> Tensor:
        """Sigma^-1 restricted to the open directions."""
        return energy.force(a @ basis) @ basis.mT * free

    residual = -energy.force(known + start @ basis - centre) @ basis.mT * free
    moved = conjugate_gradients(apply, residual, lambda force: force @ preconditioner)
    return known + (start + moved) @ basis


def complete_patchwise(knowledge: Knowledge, mean: Tensor, covariance: Tensor) -> Tensor:
    """Normalised patches (N, p), each the most probable by itself under N(mean, covariance)."""
    known, basis = knowledge.known, knowledge.basis
    mean, covariance = mean.to(known), covariance.to(known)
    ridge = JITTER * float(covariance.diagonal().mean())
    precision = torch.linalg.inv(covariance + ridge * torch.eye(len(covariance)).to(covariance))
    pull = (mean - known) @ precision @ basis.mT
    return known + torch.linalg.solve(basis @ precision @ basis.mT, pull.mT).mT @ basis


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    residual: Tensor,
    precondition: Callable[[Tensor], Tensor],
) -> Tensor:
    """The solution a of apply(a) = residual, starting at zero."""
    solution = torch.zeros_like(residual)
    target = TOLERANCE * residual.norm()
    shaped = precondition(residual)
    direction, product = shaped, (residual * shaped).sum()
    for _ in range(STEPS):
        if residual.norm() <= target or spent():
            break
        moved = apply(direction)
        step = product / (direction * moved).sum()
        solution = solution + step * direction
        residual = residual - step * moved
        shaped = precondition(residual)
        next_product = (residual * shaped).sum()
        direction, product = shaped + next_product / product * direction, next_product
    return solution
