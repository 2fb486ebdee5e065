"""The most probable picture: conjugate gradients against a dense solve, and flat regions."""

from __future__ import annotations

from typing import Literal

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


def energy_and_matrix() -> tuple[FieldEnergy, Tensor]:
    """The field's energy, and Sigma^-1 as a matrix over all patches' entries."""
    energy = FieldEnergy.of(stationary_prior(SIZE), PATCH, PIXELS)
    eye = torch.eye(4 * 48, dtype=torch.float64)
    return energy, torch.stack([energy.force(row.view(4, 48)).flatten() for row in eye])


@pytest.mark.parametrize("open_directions", [0, 1, 5, 20])
def test_conjugate_gradients_find_the_dense_solution(open_directions: int) -> None:
    known, (energy, matrix) = knowledge(open_directions), energy_and_matrix()
    found = complete(known, energy)
    basis = np.kron(np.eye(4), known.basis.numpy())
    centre = np.tile(np.repeat(energy.mean.numpy(), PATCH**2), 4)
    offset = known.known.numpy().ravel() - centre
    force = basis @ matrix.numpy()
    a = np.linalg.solve(force @ basis.T, -force @ offset)
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


def test_a_prior_of_pictures_beats_one_of_patches_and_that_one_none() -> None:
    scores = []
    for completion in ("field", "patch", "none"):
        attack = find_attack("masked_span", {"completion": completion, "prior": "stationary"})
        view, _ = planted_view(planted_model(unknown_embedding=True), attack, "c")
        found = attack.run(view, generator=torch.Generator())
        scores.append(float(psnr(found.images, planted_images()).mean()))
    assert scores[0] > scores[1] + 0.5 > scores[2] + 1


# planted pictures with flat regions: what several uploads leave open of them is found -------------

FLAT = Pixels(96, (0.5,) * 3, (0.5,) * 3)


def patches_of(name: str) -> Tensor:
    """(144, 192) in [0, 1]."""
    images = {image.image_id: image.image for image in load_images("flat", size=96)}
    return to_patches(images[name], 8).double()


def known_but_for(patches: Tensor, lacks: Literal["levels", "differences"]) -> Knowledge:
    """The picture's patches, in [0, 1], without their part along one direction: their level; or
    along two: the differences of three patches that were masked every time."""
    x = normalised(patches, FLAT, 8)
    directions = torch.ones(1, 192).double() if lacks == "levels" else x[[67, 78]] - x[65]
    basis = torch.linalg.qr(directions.mT).Q.mT
    return Knowledge(x - x @ basis.mT @ basis, basis, torch.zeros(len(x), dtype=torch.bool))


@pytest.mark.nightly
def test_a_drawing_known_but_for_its_levels_comes_back() -> None:
    patches = patches_of("drawing/phantom")
    knowledge = known_but_for(patches, "levels")
    likely = complete(knowledge, field_energy("stationary", 8, FLAT))
    assert (in_levels(likely, FLAT, 8) - patches).abs().max() > 0.05
    found = fewest_steps(knowledge, likely, 8, FLAT)
    assert found.whole.double().mean() > 0.9
    assert ((255 * found.patches).round() - 255 * patches).abs().max() < 1e-3


def test_pixels_do_not_leave_their_range() -> None:
    """One patch is half black and half white: no other level is possible, whatever is beside it."""
    patches = torch.full((144, 192), 0.5).double()
    patches[70] = torch.tensor([0.0, 1.0]).double().repeat(96)
    start = normalised(patches + 0.2, FLAT, 8)
    found = fewest_steps(known_but_for(patches, "levels"), start, 8, FLAT).patches[70]
    assert found.min() > -0.02
    assert found.max() < 1.02


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("half_blurred/chelsea_top", True),
        ("letterboxed/coffee_wide", True),
        ("half_blurred/chelsea_top", False),
    ],
)
def test_steps_between_patches_are_whole(name: str, whole: bool) -> None:
    """The field's guess is off, the lattice is not; nothing is taken for exact where no pixel is
    whole."""
    patches = patches_of(name)
    if not whole:
        noise = np.random.default_rng(0).uniform(-0.5, 0.5, (144, 192)) / 255
        patches = 0.9 * patches + 0.05 + torch.from_numpy(noise)
    knowledge, energy = known_but_for(patches, "differences"), field_energy("stationary", 8, FLAT)
    likely = complete(knowledge, energy)
    found = whole_picture(knowledge, likely, energy, FLAT)
    assert torch.equal(found, likely) != whole
    if whole:
        off, right = (
            255 * (in_levels(one, FLAT, 8) - patches).abs().amax(1) for one in (likely, found)
        )
        assert (off > 0.5).double().mean() > 0.5
        assert (right < 1e-3).double().mean() > 0.95
