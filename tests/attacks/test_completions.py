"""The most probable picture: conjugate gradients against a dense solve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations.completion import (
    FieldEnergy,
    complete,
    complete_patchwise,
    fewest_steps,
    field_energy,
    whole_picture,
)
from attacks.equations.patch_system import in_levels, normalised
from attacks.equations.span import Knowledge
from attacks.prior.gaussian import stationary_prior
from mjp_privacy.data import load_images
from mjp_privacy.interfaces import Pixels
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view

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


# how the directions that an upload leaves open are filled -----------------------------------------


def psnr_with(completion: str) -> float:
    """Mean PSNR of planted pictures under MJP."""
    attack = find_attack("masked_span", {"completion": completion, "prior": "stationary"})
    view, _ = planted_view(planted_model(unknown_embedding=True), attack, "c")
    found = attack.run(view, generator=torch.Generator())
    return float(psnr(found.images, planted_images()).mean())


def test_a_prior_of_pictures_beats_one_of_patches_and_that_one_none() -> None:
    field, patch, none = map(psnr_with, ("field", "patch", "none"))
    assert field > patch + 0.5
    assert patch > none + 0.5


# planted pictures with flat regions: what several uploads leave open of them is found -------------

SIDE, FLAT_PATCH = 96, 8
FLAT_PIXELS = Pixels(SIDE, (0.5,) * 3, (0.5,) * 3)


def patches_of(name: str) -> Tensor:
    """(144, 192) in [0, 1]."""
    images = {image.image_id: image.image for image in load_images("flat", size=SIDE)}
    return to_patches(images[name], FLAT_PATCH).double()


def known_but_for(patches: Tensor, directions: Tensor) -> Knowledge:
    """The picture's patches, in [0, 1], without their part along the directions (q, p)."""
    x = normalised(patches, FLAT_PIXELS, FLAT_PATCH)
    basis = torch.linalg.qr(directions.mT).Q.mT
    return Knowledge(x - x @ basis.mT @ basis, basis, torch.zeros(len(x), dtype=torch.bool))


@pytest.mark.nightly
def test_a_drawing_known_but_for_its_levels_comes_back() -> None:
    """Black and white patches masked every time: all patches lack their level."""
    patches = patches_of("drawing/phantom")
    knowledge = known_but_for(patches, torch.ones(1, 192).double())
    likely = complete(knowledge, field_energy("stationary", FLAT_PATCH, FLAT_PIXELS))
    assert (in_levels(likely, FLAT_PIXELS, FLAT_PATCH) - patches).abs().max() > 0.05
    found = fewest_steps(knowledge, likely, FLAT_PATCH, FLAT_PIXELS)
    assert found.whole.double().mean() > 0.9
    assert ((255 * found.patches).round() - 255 * patches).abs().max() < 1e-3


def test_pixels_do_not_leave_their_range() -> None:
    """One patch is half black and half white: no other level is possible, whatever is beside it."""
    patches = torch.full((144, 192), 0.5).double()
    patches[70] = torch.tensor([0.0, 1.0]).double().repeat(96)
    knowledge = known_but_for(patches, torch.ones(1, 192).double())
    start = normalised(patches + 0.2, FLAT_PIXELS, FLAT_PATCH)
    found = fewest_steps(knowledge, start, FLAT_PATCH, FLAT_PIXELS).patches[70]
    assert found.min() > -0.02
    assert found.max() < 1.02


@pytest.mark.parametrize("name", ["half_blurred/chelsea_top", "letterboxed/coffee_wide"])
def test_steps_between_patches_are_whole(name: str) -> None:
    """Three patches masked every time: the field's guess is off, the lattice is not."""
    patches = patches_of(name)
    x = normalised(patches, FLAT_PIXELS, FLAT_PATCH)
    knowledge = known_but_for(patches, x[[67, 78]] - x[65])
    energy = field_energy("stationary", FLAT_PATCH, FLAT_PIXELS)
    likely = complete(knowledge, energy)
    exact = in_levels(
        whole_picture(knowledge, likely, energy, FLAT_PIXELS),
        FLAT_PIXELS,
        FLAT_PATCH,
    )
    off = (255 * (in_levels(likely, FLAT_PIXELS, FLAT_PATCH) - patches)).abs().amax(1)
    assert (off > 0.5).double().mean() > 0.5
    right = (255 * (exact - patches)).abs().amax(1) < 1e-3
    assert right.double().mean() > 0.95


def test_pixels_that_are_no_grey_levels_keep_the_guess() -> None:
    """Nothing is taken for exact where no pixel is whole."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (144, 192)) / 255
    patches = 0.9 * patches_of("half_blurred/chelsea_top") + 0.05 + torch.from_numpy(noise)
    x = normalised(patches, FLAT_PIXELS, FLAT_PATCH)
    knowledge = known_but_for(patches, x[[67, 78]] - x[65])
    energy = field_energy("stationary", FLAT_PATCH, FLAT_PIXELS)
    likely = complete(knowledge, energy)
    assert torch.equal(whole_picture(knowledge, likely, energy, FLAT_PIXELS), likely)
