"""The lattice behind a span: planted patches come back, grey level by grey level."""

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks.equations.span import hull_rows, split_hull
from attacks.lattice.cost import outside, patch_cost, precision
from attacks.lattice.reduction import lll
from attacks.lattice.unmixing import Unmixed, unmix, unmix_differences
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
) -> tuple[Tensor, Tensor]:
    """(hull, unmasked patches up to differences) from a float32 gradient G = A^T X."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(patches), WIDTH, generator=generator, dtype=torch.float64)
    area = PATCH**2
    x = (patches - torch.tensor(mean).double().repeat_interleave(area)) / torch.tensor(
        std
    ).double().repeat_interleave(area)
    gradient = (rows.T @ x).float().double()
    seen = torch.linalg.qr(rows[masked:].T)[0]
    projected = gradient - seen @ (seen.T @ gradient)
    total = rows[:masked].sum(0).unsqueeze(1)
    wide = hull_rows(projected, total - seen @ (seen.T @ total), masked)
    basis, anchor = split_hull(wide)
    outer = gradient - total * anchor
    outer = outer - outer @ basis.T @ basis
    return wide, torch.linalg.lstsq(rows[masked:].T, outer).solution


def unmixed(patches: Tensor, masked: int) -> Unmixed:
    wide, _ = planted(patches, masked)
    found = unmix(wide, mean=MEAN, std=STD, patch_size=PATCH)
    assert found is not None
    return found


def same_set(found: Tensor, truth: Tensor) -> bool:
    distance = (found[:, None] - truth).abs().amax(-1)
    return bool((distance.min(0).values < 1e-6).all() and (distance.min(1).values < 1e-6).all())


@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), IMAGENET])
def test_masked_patches_come_back_exactly(
    patches: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    wide, partial = planted(patches, 6, mean=mean, std=std)
    found = unmix(wide, mean=mean, std=std, patch_size=PATCH)
    assert found is not None
    assert same_set(found.patches, patches[:6])
    completed, whole = found.complete(partial)
    assert whole.all()
    assert (completed - patches[6:]).abs().max() < 1e-6


def test_the_sum_of_the_rows_fixes_scale_and_sign(patches: Tensor) -> None:
    """In the span of all (x, 1) the last entry of a patch is 1, and so of no multiple of it."""
    wide, _ = planted(patches, 6)
    x = torch.nn.functional.pad((patches[:6] - 0.5) / 0.5, (0, 1), value=1.0)
    assert torch.allclose(x @ wide.T @ wide, x, atol=1e-4)
    doubled = torch.cat((2 * x[:, :-1], x[:, -1:]), 1)
    assert ((doubled @ wide.T @ wide - doubled).norm(dim=1) > 0.1).all()


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
    wide, _ = planted(patches + noise / 255, 2)
    assert unmix(wide, mean=MEAN, std=STD, patch_size=PATCH) is None


def test_a_partial_patch_of_no_integers_is_not_passed_off(patches: Tensor) -> None:
    _, partial = planted(patches, 6)
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


@pytest.mark.parametrize("level", [0.0, 0.2, 1.0])
def test_a_flat_patch_among_them(patches: Tensor, level: float) -> None:
    """One colour, black as well as any other, leaves no level open: no guess is needed. (About a
    middle grey every patch could be reversed, and would look as much like a photograph.)"""
    some = patches.clone()
    some[2] = level
    wide, partial = planted(some, 6)
    found = unmix(wide, mean=MEAN, std=STD, patch_size=PATCH)
    assert found is not None
    assert not len(found.frame.colours)
    assert same_set(found.patches, some[:6])
    completed, whole = found.complete(partial)
    assert whole.all()
    assert (completed - some[6:]).abs().max() < 1e-6


def test_flat_patches_of_two_colours_leave_a_level_to_the_guess(patches: Tensor) -> None:
    """Black and white masked: every patch is known but for its level."""
    some = patches.clone()
    some[2], some[4] = 0.0, 1.0
    wide, partial = planted(some, 6)
    found = unmix(wide, mean=MEAN, std=STD, patch_size=PATCH)
    assert found is not None
    assert np.array_equal(abs(found.frame.colours), np.ones((1, 192)))
    guess = some[6:].mean(-1, keepdim=True).expand(-1, some.shape[1])
    completed, whole = found.complete(partial, guess)
    assert whole.all()
    assert (completed - some[6:]).abs().max() < 1e-6


def test_flat_patches_of_two_hues_are_told_apart(patches: Tensor) -> None:
    """The level that they leave open is along the difference of their hues."""
    area = PATCH**2
    hues = torch.tensor([[10.0, 20, 30], [13, 27, 30]]).double() / 255
    some = patches.clone()
    some[2], some[4] = hues.repeat_interleave(area, 1)
    found = unmix(planted(some, 6)[0], mean=MEAN, std=STD, patch_size=PATCH)
    assert found is not None
    assert abs(found.frame.colours[:, ::area]).tolist() == [[3, 7, 0]]


def test_many_equal_patches_are_one(patches: Tensor) -> None:
    """Five of six masked patches are white, as in a drawing."""
    some = patches.clone()
    some[1:6] = 1.0
    found = unmixed(some, 6)
    assert same_set(found.patches, some[:2])


def test_what_several_uploads_leave_open_has_a_lattice_too(patches: Tensor) -> None:
    x = 2 * patches - 1
    basis = torch.linalg.qr((x[1:4] - x[:1]).mT).Q.mT
    known = x[6:] - x[6:] @ basis.mT @ basis
    found = unmix_differences(basis, mean=MEAN, std=STD, patch_size=PATCH)
    assert found is not None
    steps = found.patches[1:]
    whole_parts = torch.linalg.lstsq(steps.mT, (patches[1:4] - patches[:1]).mT).solution
    assert torch.allclose(whole_parts, whole_parts.round(), atol=1e-6)
    guess = (patches[6:] + 0.2 * steps[0] - 0.1 * steps[2]).clone()
    nearest, whole = found.nearest(known, guess)
    assert whole.all()
    assert torch.allclose(nearest, patches[6:], atol=1e-9)
