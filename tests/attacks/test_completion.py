"""The most probable picture: conjugate gradients against a dense solve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks.equations.completion import FieldEnergy, complete, complete_patchwise
from attacks.equations.span import Knowledge
from attacks.prior import stationary_prior
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import to_patches

SIZE, PATCH = 8, 4
PIXELS = Pixels(SIZE, (0.4, 0.5, 0.6), (0.5, 0.5, 0.5))


def knowledge(open_directions: int) -> Knowledge:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(48, open_directions, generator=generator).double()).Q.mT
    patches = torch.randn(4, 48, generator=generator).double()
    known = patches - (patches @ basis.mT) @ basis
    return Knowledge(known, basis, torch.zeros(4, dtype=torch.bool))


def energy() -> FieldEnergy:
    return FieldEnergy.of(stationary_prior(SIZE), PATCH, PIXELS)


def dense(of: FieldEnergy) -> Tensor:
    """Sigma^-1 as a matrix over all patches' entries."""
    eye = torch.eye(4 * 48, dtype=torch.float64)
    return torch.stack([of.force(row.view(4, 48)).flatten() for row in eye])


def test_the_force_is_a_symmetric_positive_matrix_whose_inverse_is_the_fields_covariance() -> None:
    matrix = dense(energy())
    assert torch.allclose(matrix, matrix.mT, atol=1e-9 * float(matrix.abs().max()))
    assert torch.linalg.eigvalsh(matrix).min() > 0
    prior = stationary_prior(SIZE)
    spectrum = prior.field_spectrum(SIZE, PIXELS)
    total = float(spectrum.diagonal(dim1=-2, dim2=-1).sum())  # the basis is orthonormal
    assert torch.linalg.inv(matrix).trace() == pytest.approx(total, rel=1e-4)


def test_the_force_weighs_the_coefficients_of_the_cosines() -> None:
    """Analysed with the cosines of the prior's own basis, weighed, put together again."""
    field = energy()
    picture = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(1)).double()
    coefficients = field.basis @ picture @ field.basis.mT
    weighed = torch.einsum("cdij,dij->cij", field.precision, coefficients)
    expected = to_patches(field.basis.mT @ weighed @ field.basis, PATCH)
    found = field.force(to_patches(picture, PATCH))
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("open_directions", [1, 5, 20])
def test_conjugate_gradients_find_the_dense_solution(open_directions: int) -> None:
    known = knowledge(open_directions)
    field = energy()
    found = complete(known, field)
    matrix, basis = dense(field).numpy(), np.kron(np.eye(4), known.basis.numpy())
    centre = np.tile(np.repeat(field.mean.numpy(), PATCH**2), 4)
    offset = known.known.numpy().ravel() - centre
    a = np.linalg.solve(basis @ matrix @ basis.T, -basis @ matrix @ offset)
    expected = known.known.numpy().ravel() + a @ basis
    assert np.abs(found.numpy().ravel() - expected).max() < 2e-3
    outside = found - (found @ known.basis.mT) @ known.basis
    assert torch.allclose(outside, known.known, atol=1e-10)


def test_patchwise_completion_is_gaussian_conditioning() -> None:
    known = knowledge(6)
    mean, covariance = stationary_prior(SIZE).patch(PATCH, PIXELS)
    found = complete_patchwise(known, mean, covariance)
    rest = torch.linalg.svd(known.basis, full_matrices=True).Vh[6:]  # what is known of a patch
    through = covariance @ rest.mT
    gain = torch.linalg.solve(rest @ through, through.mT).mT
    expected = mean + ((known.known - mean) @ rest.mT) @ gain.mT
    assert torch.allclose(found, expected, atol=1e-4)


def test_with_nothing_open_the_known_is_the_answer() -> None:
    known = Knowledge(torch.ones(4, 48).double(), torch.zeros(0, 48).double(), torch.zeros(4))
    assert torch.equal(complete(known, energy()), known.known)
