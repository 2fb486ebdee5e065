"""Planted pictures with flat regions: what several uploads leave open of them is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks.equations.completion import complete, fewest_steps, field_energy, whole_picture
from attacks.equations.pictures import in_levels, normalised
from attacks.equations.span import Knowledge
from mjp_privacy.data import load_images
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import to_patches

SIDE, PATCH = 96, 8
PIXELS = Pixels(SIDE, (0.5,) * 3, (0.5,) * 3)


def patches_of(name: str) -> Tensor:
    """(144, 192) in [0, 1]."""
    images = {image.image_id: image.image for image in load_images("flat", size=SIDE)}
    return to_patches(images[name], PATCH).double()


def known_but_for(patches: Tensor, directions: Tensor) -> Knowledge:
    """The picture's patches, in [0, 1], without their part along the directions (q, p)."""
    x = normalised(patches, PIXELS, PATCH)
    basis = torch.linalg.qr(directions.mT).Q.mT
    return Knowledge(x - x @ basis.mT @ basis, basis, torch.zeros(len(x), dtype=torch.bool))


@pytest.mark.nightly
def test_a_drawing_known_but_for_its_levels_comes_back() -> None:
    """Black and white patches masked every time: all patches lack their level."""
    patches = patches_of("drawing/phantom")
    knowledge = known_but_for(patches, torch.ones(1, 192).double())
    likely = complete(knowledge, field_energy("stationary", PATCH, PIXELS))
    assert (in_levels(likely, PIXELS, PATCH) - patches).abs().max() > 0.05
    found = fewest_steps(knowledge, likely, PATCH, PIXELS)
    assert found.whole.double().mean() > 0.9
    assert ((255 * found.patches).round() - 255 * patches).abs().max() < 1e-3


def test_pixels_do_not_leave_their_range() -> None:
    """One patch is half black and half white: no other level is possible, whatever is beside it."""
    patches = torch.full((144, 192), 0.5).double()
    patches[70] = torch.tensor([0.0, 1.0]).double().repeat(96)
    knowledge = known_but_for(patches, torch.ones(1, 192).double())
    start = normalised(patches + 0.2, PIXELS, PATCH)
    found = fewest_steps(knowledge, start, PATCH, PIXELS).patches[70]
    assert found.min() > -0.02
    assert found.max() < 1.02


@pytest.mark.parametrize("name", ["half_blurred/chelsea_top", "letterboxed/coffee_wide"])
def test_steps_between_patches_are_whole(name: str) -> None:
    """Three patches masked every time: the field's guess is off, the lattice is not."""
    patches = patches_of(name)
    x = normalised(patches, PIXELS, PATCH)
    knowledge = known_but_for(patches, x[[67, 78]] - x[65])
    energy = field_energy("stationary", PATCH, PIXELS)
    likely = complete(knowledge, energy)
    exact = in_levels(whole_picture(knowledge, likely, energy, PIXELS), PIXELS, PATCH)
    off = (255 * (in_levels(likely, PIXELS, PATCH) - patches)).abs().amax(1)
    assert (off > 0.5).double().mean() > 0.5
    right = (255 * (exact - patches)).abs().amax(1) < 1e-3
    assert right.double().mean() > 0.95


def test_pixels_that_are_no_grey_levels_keep_the_guess() -> None:
    """Nothing is taken for exact where no pixel is whole."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (144, 192)) / 255
    patches = 0.9 * patches_of("half_blurred/chelsea_top") + 0.05 + torch.from_numpy(noise)
    x = normalised(patches, PIXELS, PATCH)
    knowledge = known_but_for(patches, x[[67, 78]] - x[65])
    energy = field_energy("stationary", PATCH, PIXELS)
    likely = complete(knowledge, energy)
    assert torch.equal(whole_picture(knowledge, likely, energy, PIXELS), likely)
