"""The lattice behind a span: planted patches come back, grey level by grey level."""

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks.equations.span import masked_basis
from attacks.lattice.cost import outside, patch_cost, precision
from attacks.lattice.reduction import lll
from attacks.lattice.unmixing import Unmixed, sum_coordinates, unmix
from mjp_privacy.data import load_images
from mjp_privacy.models.jigsaw import to_patches

PATCH, WIDTH = 8, 40
MEAN, STD = (0.5,) * 3, (0.5,) * 3
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def patches() -> Tensor:
    """(16, 192) of a photograph, multiples of 1/255: 6 to be masked and 10 others."""
    image = next(iter(load_images("embedded", size=96, limit=1))).image
    return to_patches(image, PATCH)[40:56].double()


def planted(
    patches: Tensor, masked: int, *, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD
) -> tuple[Tensor, Tensor, Tensor]:
    """(basis, t, unmasked patches up to the span) from a float32 gradient G = A^T X."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(patches), WIDTH, generator=generator, dtype=torch.float64)
    area = PATCH**2
    x = (patches - torch.tensor(mean).double().repeat_interleave(area)) / torch.tensor(
        std
    ).double().repeat_interleave(area)
    gradient = (rows.T @ x).float().double()
    seen = torch.linalg.qr(rows[masked:].T)[0]
    projected = gradient - seen @ (seen.T @ gradient)
    total = rows[:masked].sum(0)
    basis = masked_basis(projected, masked)
    t = sum_coordinates(projected, basis, total - seen @ (seen.T @ total))
    outer = gradient - gradient @ basis.T @ basis
    return basis, t, torch.linalg.lstsq(rows[masked:].T, outer).solution


def unmixed(patches: Tensor, masked: int) -> Unmixed:
    basis, t, _ = planted(patches, masked)
    found = unmix(basis, t, mean=MEAN, std=STD, patch_size=PATCH)
    assert found is not None
    return found


def same_set(found: Tensor, truth: Tensor) -> bool:
    distance = (found[:, None] - truth).abs().amax(-1)
    return bool((distance.min(0).values < 1e-6).all() and (distance.min(1).values < 1e-6).all())


@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), IMAGENET])
def test_masked_patches_come_back_exactly(
    patches: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    basis, t, partial = planted(patches, 6, mean=mean, std=std)
    found = unmix(basis, t, mean=mean, std=std, patch_size=PATCH)
    assert found is not None
    assert same_set(found.patches, patches[:6])
    completed, whole = found.complete(partial)
    assert whole.all()
    assert (completed - patches[6:]).abs().max() < 1e-6


def test_the_sum_of_the_rows_fixes_scale_and_sign(patches: Tensor) -> None:
    basis, t, _ = planted(patches, 6)
    x = (patches[:6] - 0.5) / 0.5
    assert torch.allclose(x @ basis.T @ t, torch.ones(6).double(), atol=1e-4)


def test_one_masked_patch_is_enough_for_a_lattice(patches: Tensor) -> None:
    assert same_set(unmixed(patches, 1).patches, patches[:1])


def test_equal_patches_are_found_once(patches: Tensor) -> None:
    some = patches.clone()
    some[3] = some[1]
    assert same_set(unmixed(some, 6).patches, some[[0, 1, 2, 4, 5]])


def test_the_same_answer_every_time(patches: Tensor) -> None:
    torch.manual_seed(1)
    np.random.default_rng(1)
    first = unmixed(patches, 6).patches
    assert torch.equal(first, unmixed(patches, 6).patches)


def test_pixels_that_are_no_grey_levels_have_no_lattice(patches: Tensor) -> None:
    """A mixture of images, or noise after rounding, breaks the attack, and it says so."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(patches.shape, generator=generator, dtype=torch.float64) - 0.5
    basis, t, _ = planted(patches + noise / 255, 2)
    assert unmix(basis, t, mean=MEAN, std=STD, patch_size=PATCH) is None


def test_a_partial_patch_of_no_integers_is_not_passed_off(patches: Tensor) -> None:
    _, _, partial = planted(patches, 6)
    found = unmixed(patches, 6)
    generator = torch.Generator().manual_seed(2)
    spoilt = partial.clone()
    spoilt[3] += 0.02 * torch.randn(partial.shape[1], generator=generator, dtype=torch.float64)
    completed, whole = found.complete(spoilt)
    assert whole.tolist() == [row != 3 for row in range(10)]
    assert (completed - patches[6:])[whole].abs().max() < 1e-6


def test_lll_reduces_and_stays_in_the_lattice() -> None:
    """Size reduction and Lovasz's condition are checked on a factorisation made here."""
    rng = np.random.default_rng(0)
    short = np.eye(12) * 5 + rng.integers(-1, 2, (12, 12))
    mixing = np.tril(rng.integers(-9, 10, (12, 12)), -1) + np.eye(12)
    rows = mixing.T @ mixing @ short
    transform = lll(rows, level=2.0**30)  # so that nothing is lost by rounding
    assert abs(round(np.linalg.det(transform))) == 1
    assert np.array_equal(transform, np.rint(transform))
    reduced = transform @ rows
    assert np.linalg.norm(reduced, axis=1).max() <= 1.5 * np.linalg.norm(short, axis=1).max()
    triangle = np.linalg.qr(reduced.T)[1].T  # lower: row i is the i-th vector
    lengths = abs(triangle.diagonal())
    assert np.isclose(lengths.prod(), abs(np.linalg.det(short)), rtol=1e-6)
    assert (abs(np.tril(triangle, -1)) <= 0.511 * lengths).all()
    following = np.hypot(lengths[1:], triangle.diagonal(-1))
    assert (following >= np.sqrt(0.98) * lengths[:-1]).all()


def test_lll_of_real_rows_does_not_depend_on_their_scale() -> None:
    rows = np.random.default_rng(1).normal(size=(8, 11))
    assert np.array_equal(lll(rows), lll(1e-6 * rows))


def test_photographs_cost_less_than_their_mixtures(patches: Tensor) -> None:
    grey = 255 * patches.numpy()
    mixtures = grey[:8] + grey[8:] - grey[::-1][:8]
    assert (patch_cost(grey[:8], PATCH) < patch_cost(mixtures, PATCH)).mean() > 0.8
    assert outside(grey).max() == 0
    assert np.allclose(outside(np.array([[-2.0, 256.0, 7.0]])), 3)


def test_the_metric_is_positive_and_prefers_smooth_patches() -> None:
    metric = precision(192, PATCH)
    assert np.linalg.eigvalsh(metric).min() > 0
    smooth = np.tile(np.linspace(-1, 1, PATCH), 3 * PATCH)
    rough = smooth[np.random.default_rng(0).permutation(192)]
    assert smooth @ metric @ smooth < 0.2 * rough @ metric @ rough


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_a_flat_patch_among_them(patches: Tensor, level: float) -> None:
    """A saturated patch makes a constant a combination of the patches, and black counts as none.

    Then the level of an unmasked patch is not determined, and a guess must give it.
    """
    some = patches.clone()
    some[2] = level
    basis, t, partial = planted(some, 6)
    found = unmix(basis, t, mean=MEAN, std=STD, patch_size=PATCH)
    assert found is not None
    assert same_set(found.patches, some[:6])
    guess = some[6:].mean(-1, keepdim=True).expand(-1, some.shape[1])
    completed, whole = found.complete(partial, guess)
    assert whole.all()
    assert (completed - some[6:]).abs().max() < 1e-6
