"""The terms of gradvit against their formulas, and the registration of seeds on planted moves."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.fft import dctn
from torch import Tensor

from attacks.breaching import Borders, FieldPrior, Near, SquaredDistance
from attacks.equations.completion import FieldEnergy
from attacks.jigsaw import in_the_order_of, placed_as, shifted_onto
from attacks.prior import stationary_prior
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import shuffle_patches, to_patches
from tests.helpers.models import MEAN, STD, some_images

PIXELS = Pixels(32, MEAN, STD)


def field() -> FieldEnergy:
    return FieldEnergy.of(stationary_prior(32), 8, PIXELS)


# terms --------------------------------------------------------------------------------------------


def test_squared_distance_is_the_share_of_the_uploads_square() -> None:
    uploaded = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    candidate = [torch.tensor([0.0, 1.0]), torch.tensor([[2.0]])]
    distance = SquaredDistance()
    assert float(distance.gradient_based_loss(candidate, uploaded)) == pytest.approx(14 / 25)
    nothing = [torch.zeros_like(grad) for grad in uploaded]
    assert float(distance.gradient_based_loss(nothing, uploaded)) == pytest.approx(1)
    assert float(distance.gradient_based_loss(uploaded, uploaded)) == 0
    stronger = [[10 * grad for grad in grads] for grads in (candidate, uploaded)]
    assert float(distance.gradient_based_loss(*stronger)) == pytest.approx(14 / 25)


def test_borders_see_steps_between_patches_alone() -> None:
    borders = Borders(1.0, patch_size=8)
    inside = torch.zeros(1, 3, 32, 32, dtype=torch.float64)
    inside[..., 4:, :] = 1  # a step within the first row of patches
    assert float(borders(inside)) == pytest.approx(0, abs=1e-5)
    across = torch.zeros(1, 3, 32, 32, dtype=torch.float64)
    across[..., 8:, :] = 2  # 4 of the 24 borders
    assert float(borders(across)) == pytest.approx(2 * 4 / 24, abs=1e-5)
    assert float(borders(across.mT)) == pytest.approx(2 * 4 / 24, abs=1e-5)


def test_borders_are_the_norms_of_each_borders_step() -> None:
    pictures = some_images(2)
    expected = []
    for picture in pictures:
        for row in range(0, 32, 8):
            for at in (8, 16, 24):
                for image in (picture, picture.mT):
                    step = image[:, row : row + 8, at] - image[:, row : row + 8, at - 1]
                    expected.append(float(step.norm()) / math.sqrt(24))
    mean = sum(expected) / len(expected)
    assert len(expected) == 48
    assert float(Borders(3.0, patch_size=8)(pictures)) == pytest.approx(3 * mean, rel=1e-9)


def test_a_picture_without_borders_has_no_term_and_a_flat_one_a_derivative() -> None:
    pictures = torch.zeros(1, 3, 32, 32, requires_grad=True)
    for patch_size in (32, 8):
        value = Borders(1.0, patch_size)(pictures)
        (derivative,) = torch.autograd.grad(value, pictures)
        assert value.item() == pytest.approx(0, abs=1e-5)
        assert not derivative.any()


def by_the_definition(pictures: Tensor, energy: FieldEnergy) -> float:
    """The mean energy per value from SciPy's DCT and a loop over its coefficients."""
    total = 0.0
    for picture in pictures:
        centred = picture - energy.mean.view(-1, 1, 1)
        waves = torch.from_numpy(dctn(centred.numpy(), axes=(1, 2), norm="ortho"))
        for row in range(32):
            for column in range(32):
                wave = waves[:, row, column]
                total += float(wave @ energy.precision[:, :, row, column] @ wave)
    return total / pictures.numel()


def test_the_field_prior_is_the_energy_per_value() -> None:
    pictures, energy = some_images(2), field()
    assert float(FieldPrior(0.5, energy)(pictures)) == pytest.approx(
        0.5 * by_the_definition(pictures, energy), rel=1e-6
    )


def test_the_field_priors_derivative_is_the_force() -> None:
    picture, energy = some_images(1).requires_grad_(), field()
    FieldPrior(1.0, energy)(picture).backward()
    assert picture.grad is not None
    centred = picture.detach()[0] - energy.mean.view(-1, 1, 1)
    force = 2 * energy.force(to_patches(centred, 8)) / picture.numel()
    torch.testing.assert_close(to_patches(picture.grad[0], 8), force, rtol=1e-6, atol=1e-9)


def test_smooth_pictures_are_more_probable_than_noise() -> None:
    smooth = torch.linspace(-1, 1, 32).expand(1, 3, 32, 32)
    noise = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    prior = FieldPrior(1.0, field())
    assert float(prior(smooth)) < 1 < float(prior(noise))


def test_near_is_the_mean_square() -> None:
    pictures = torch.tensor([[[[1.0, 3.0]]]])
    assert float(Near(0.5, torch.tensor([[[[0.0, 1.0]]]]))(pictures)) == 0.5 * (1 + 4) / 2


# registration -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, -1), (-2, 0), (1, 2)])
def test_a_shift_is_taken_back(down: int, right: int) -> None:
    large = some_images(1, 40)[0]
    reference, moved = large[:, 4:36, 4:36], large[:, 4 + down : 36 + down, 4 + right : 36 + right]
    torch.testing.assert_close(shifted_onto(moved, reference), reference, rtol=0, atol=0)


def test_a_shift_beyond_the_reach_is_not_found() -> None:
    large = some_images(1, 40)[0]
    reference, moved = large[:, 4:36, 4:36], large[:, 7:39, 4:36]
    assert not torch.equal(shifted_onto(moved, reference), reference)
    assert torch.equal(shifted_onto(moved, reference, reach=3), reference)


def test_masked_patches_go_where_the_reference_has_them_and_others_stay() -> None:
    reference = some_images(1)[0]
    mask = torch.zeros(16, dtype=torch.bool)
    mask[[1, 4, 6, 11]] = True
    order = torch.arange(16)
    order[[1, 4, 6, 11]] = torch.tensor([6, 11, 4, 1])
    shuffled = shuffle_patches(reference[None], order[None], 8)[0]
    noisy = shuffled + 0.05 * some_images(1).flip(-1)[0]
    placed = placed_as(noisy, reference, mask, 8)
    assert float((placed - reference).abs().max()) <= 0.05
    unmasked = placed_as(noisy, reference, torch.zeros(16, dtype=torch.bool), 8)
    assert torch.equal(unmasked, noisy)
    visible_moved = placed_as(noisy, reference, ~mask, 8)
    assert float((visible_moved - reference).abs().max()) > 0.3


def test_pictures_change_places_within_their_label_alone() -> None:
    reference = some_images(4)
    found = reference[[1, 0, 3, 2]]
    same = in_the_order_of(found, reference, torch.tensor([7, 7, 7, 7]))
    assert torch.equal(same, reference)
    labels = torch.tensor([0, 0, 1, 2])
    assert torch.equal(in_the_order_of(found, reference, labels), reference[[0, 1, 3, 2]])
