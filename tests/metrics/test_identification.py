"""Identification against plain loops, against LPIPS itself, and with planted answers."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from mjp_privacy.metrics import score
from mjp_privacy.metrics.lpips import PACKAGED
from mjp_privacy.metrics.matching import (
    MOST,
    embed,
    identify,
    matched_distances,
    matched_psnr,
    pointing,
    shrink,
)
from mjp_privacy.models.jigsaw import to_images, to_patches
from tests.helpers.report_rows import photograph


def photographs(count: int, side: int = 64) -> Tensor:
    return torch.stack([photograph(index, side) for index in range(count)])


def noisy(images: Tensor, spread: float, seed: int = 0) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return (images + spread * noise).clamp(0, 1)


# ranks --------------------------------------------------------------------------------------------


def test_ranks_by_hand() -> None:
    distances = np.array([[0.1, 0.5, 0.9], [0.2, 0.3, 0.9], [0.1, 0.2, 0.3]])
    found = pointing(distances)
    assert (found.first.count, found.first.of) == (1, 3)
    assert found.reciprocal_rank == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert found.chance == pytest.approx(100 / 3)


def test_each_points_to_its_own_until_they_are_swapped() -> None:
    references = photographs(8)
    own = identify(noisy(references, 0.02), references)
    other = identify(noisy(references, 0.02).roll(1, 0), references)
    for right, wrong in ((own.pixels, other.pixels), (own.perceptual, other.perceptual)):
        assert right is not None
        assert wrong is not None
        assert (right.first.count, right.reciprocal_rank) == (8, 1.0)
        assert wrong.first.count == 0


def test_ranks_by_pixels_are_those_of_mean_squared_errors() -> None:
    references = photographs(9, 40)
    pictures = noisy(references, 5.0)
    ranks = []
    for at, picture in enumerate(pictures):
        errors = [float((picture.double() - other).square().mean()) for other in references]
        ranks.append(1 + sum(error < errors[at] for error in errors))
    found = identify(pictures, references).pixels
    assert max(ranks) > 1
    assert found.first.count == ranks.count(1)
    assert found.reciprocal_rank == pytest.approx(np.mean(1 / np.array(ranks)))


# distances ----------------------------------------------------------------------------------------


def test_perceptual_vectors_give_lpips_for_every_pair() -> None:
    references, pictures = photographs(4), noisy(photographs(4), 0.3)
    left, right = embed(pictures).perceptual, embed(references).perceptual
    assert left is not None
    assert right is not None
    distances = torch.cdist(left.double(), right.double()).square()
    for i in range(4):
        for j in range(4):
            known = score(pictures[i : i + 1], references[j : j + 1], ["lpips/standard"])
            assert float(distances[i, j]) == pytest.approx(
                known["lpips", "standard"][0], rel=1e-3, abs=1e-4
            )


def test_features_are_alexnets_last_convolution_averaged() -> None:
    """AlexNet written out by its weights, which may be float16 copies here."""
    weights = {name: tensor.float() for name, tensor in load_file(PACKAGED).items()}
    images = photographs(3)
    mean, spread = (
        torch.tensor(three)[:, None, None]
        for three in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    values = (images - mean) / spread
    for layer, stride, padding, pooled in (
        *((0, 4, 2, True), (3, 1, 2, True), (6, 1, 1, False), (8, 1, 1, False)),
        (10, 1, 1, False),
    ):
        kernel, bias = weights[f"features.{layer}.weight"], weights[f"features.{layer}.bias"]
        values = functional.conv2d(values, kernel, bias, stride, padding).relu()
        values = functional.max_pool2d(values, 3, 2) if pooled else values
    expected = functional.normalize(values.mean((2, 3)))
    found = embed(images).features
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=0.02, atol=2e-3)


def test_images_shrink_by_area_and_never_grow() -> None:
    large = photographs(2, 192)
    torch.testing.assert_close(shrink(large), functional.avg_pool2d(large, 3))
    assert shrink(torch.rand(1, 3, 128, 64)).shape == (1, 3, 64, 32)
    small = photographs(2, 56)
    assert shrink(small) is small


def test_images_too_small_for_alexnet_are_compared_by_pixels_alone() -> None:
    references = photographs(3, 28)
    found = identify(references, references)
    assert found.pixels.first.count == 3
    assert found.perceptual is None
    assert found.features is None


# patches ------------------------------------------------------------------------------------------


def reordered(images: Tensor, patch: int, seed: int) -> Tensor:
    """Every image with its patches in another order."""
    patches = to_patches(images, patch)
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(patches.shape[1], generator=generator) for _ in images])
    mixed = patches.gather(1, order.unsqueeze(-1).expand_as(patches))
    return to_images(mixed, patch)


def test_the_order_of_patches_does_not_matter() -> None:
    references = photographs(6)
    pictures = reordered(references, 8, seed=1)
    assert (matched_psnr(pictures, references, 8) == math.inf).all()
    found = identify(pictures, references, matched=matched_distances(pictures, references, 8))
    assert found.patches is not None
    assert found.patches.first.count == 6
    assert found.pixels.first.count < 6


def test_matched_psnr_is_the_best_of_all_orders() -> None:
    references = photographs(3, 16)
    pictures = noisy(reordered(references, 8, seed=2), 0.2)
    for picture, reference, found in zip(
        pictures, references, matched_psnr(pictures, references, 8), strict=True
    ):
        patches, own = to_patches(picture.double(), 8), to_patches(reference.double(), 8)
        errors = [
            float((patches[list(order)] - own).square().mean()) for order in permutations(range(4))
        ]
        assert found == pytest.approx(-10 * math.log10(min(errors)))


def test_skipped_assignments_change_no_rank() -> None:
    references = photographs(7, 16)
    pictures = noisy(reordered(references, 8, seed=3), 3.0)
    full = np.empty((7, 7))
    for i, j in np.ndindex(7, 7):
        patches, others = to_patches(pictures[i].double(), 8), to_patches(references[j].double(), 8)
        orders = permutations(range(4))
        full[i, j] = min(float((patches[list(o)] - others).square().mean()) for o in orders)
    found, own = matched_distances(pictures, references, 8), np.diag(full)[:, None]
    assert np.diag(found) == pytest.approx(np.diag(full))
    assert found[full <= own] == pytest.approx(full[full <= own])
    assert (found[full > own] > np.broadcast_to(own, full.shape)[full > own]).all()
    assert 0 < pointing(full).first.count < 7
    assert pointing(found) == pointing(full)


def test_patches_shrink_without_mixing() -> None:
    """At 192 pixels a patch of 16 becomes 5 × 5; patches moved whole still match exactly."""
    references = photographs(3, 192)
    pictures = reordered(references, 16, seed=4)
    distances = matched_distances(pictures, references, 16)
    assert np.diag(distances) == pytest.approx(np.zeros(3), abs=1e-12)
    assert (distances[~np.eye(3, dtype=bool)] > 1e-4).all()


def test_one_image_or_too_many_are_our_own_mistakes() -> None:
    for count in (1, MOST + 1):
        images = torch.zeros(count, 3, 8, 8)
        with pytest.raises(ValueError, match="expected 2 to 200 pairs"):
            identify(images, images)
    with pytest.raises(ValueError, match="of one size"):
        identify(torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match="at most 30"):
        matched_distances(torch.zeros(31, 3, 8, 8), torch.zeros(31, 3, 8, 8), 4)
