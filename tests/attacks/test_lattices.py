"""The lattice behind a span: planted patches come back, grey level by grey level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks.equations.span import hull_rows, split_hull
from attacks.lattice.cost import (
    GRADIENT,
    Border,
    Frame,
    Parts,
    Reals,
    outside,
    patch_cost,
)
from attacks.lattice.reduction import lll
from attacks.lattice.search import (
    GAIN,
    Moves,
    deepened,
    exchanged,
    patch_basis,
    short_vectors,
)
from attacks.lattice.unmixing import (
    FIXED,
    FREE,
    Unmixed,
    border_at,
    continued,
    unmix,
    unmix_differences,
)
from attacks.masked_span import MaskedSpan, PixelLattice
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.data import load_images
from mjp_privacy.interfaces import Attack, AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import tiny_model

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
    return unmix(wide, mean=MEAN, std=STD, patch_size=PATCH)


def same_set(found: Tensor, truth: Tensor) -> bool:
    distance = (found[:, None] - truth).abs().amax(-1)
    return bool((distance.min(0).values < 1e-6).all() and (distance.min(1).values < 1e-6).all())


@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), IMAGENET])
def test_masked_patches_come_back_exactly(
    patches: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    wide, partial = planted(patches, 6, mean=mean, std=std)
    found = unmix(wide, mean=mean, std=std, patch_size=PATCH)
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


def test_photographs_cost_less_than_their_mixtures(patches: Tensor) -> None:
    grey = 255 * patches.numpy()
    mixtures = grey[:8] + grey[8:] - grey[::-1][:8]
    assert (patch_cost(grey[:8], PATCH) < patch_cost(mixtures, PATCH)).mean() > 0.8
    assert outside(grey).max() == 0
    assert np.allclose(outside(np.array([[-2.0, 256.0, 7.0]])), 3)


@pytest.mark.parametrize("level", [0.0, 0.2, 1.0])
def test_a_flat_patch_among_them(patches: Tensor, level: float) -> None:
    """One colour, black as well as any other, leaves no level open: no guess is needed. (About a
    middle grey every patch could be reversed, and would look as much like a photograph.)"""
    some = patches.clone()
    some[2] = level
    wide, partial = planted(some, 6)
    found = unmix(wide, mean=MEAN, std=STD, patch_size=PATCH)
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
    steps = found.patches[1:]
    whole_parts = torch.linalg.lstsq(steps.mT, (patches[1:4] - patches[:1]).mT).solution
    assert torch.allclose(whole_parts, whole_parts.round(), atol=1e-6)
    guess = (patches[6:] + 0.2 * steps[0] - 0.1 * steps[2]).clone()
    nearest, whole = found.nearest(known, guess)
    assert whole.all()
    assert torch.allclose(nearest, patches[6:], atol=1e-9)


# moves among lattice patches, and their costs: against sums made anew and planted patches ---------

SEARCH_PATCH, GRID, LENGTH = 8, 12, 192
PARTS = Parts(LENGTH, SEARCH_PATCH)
MASKED = np.array([26, 31, 40, 66, 77, 90, 103, 118])  # of 144, scattered


@pytest.fixture(scope="module")
def picture() -> Reals:
    """(144, 192) grey levels: a photograph in its places."""
    image = next(iter(load_images("embedded", size=96, limit=1))).image
    return np.rint(255 * to_patches(image, SEARCH_PATCH).double().numpy())


@pytest.fixture(scope="module")
def frame(picture: Reals) -> Frame:
    """Of the span of the MASKED patches, with mean and std 1/2."""
    centred = torch.from_numpy(picture[MASKED] / 127.5 - 1)
    wide = torch.nn.functional.pad(centred, (0, 1), value=1.0)
    return Frame.of(torch.linalg.qr(wide.mT)[0].mT, (0.5,) * 3, (0.5,) * 3, SEARCH_PATCH)


def coefficients(vectors: Reals, basis: Reals) -> Reals:
    """Integers C with vectors = C basis."""
    solved = np.linalg.lstsq(basis.T, vectors.T, rcond=None)[0].T
    assert np.allclose(solved @ basis, vectors, atol=1e-5)
    assert np.allclose(solved, np.rint(solved), atol=1e-6)
    return np.rint(solved)


@pytest.mark.parametrize("waves", [True, False])
def test_costs_of_sums_are_those_of_the_whole_patches(picture: Reals, waves: bool) -> None:
    parts = Parts(LENGTH, SEARCH_PATCH, waves)
    full = parts.of(picture)
    rng = np.random.default_rng(0)
    first, second, third = rng.integers(0, len(picture), (3, 50))
    sums = picture[first] + picture[second] - picture[third]
    whole = patch_cost(sums, SEARCH_PATCH)
    if not waves:
        tiles = sums.reshape(50, 3, SEARCH_PATCH, SEARCH_PATCH)
        steps = (np.diff(tiles, axis=2), np.diff(tiles, axis=3))
        whole = sum(np.log1p(abs(step)).sum((1, 2, 3)) for step in steps)
        whole += 5 * (np.maximum(-sums, 0) + np.maximum(sums - 255, 0)).sum(1)
    assert np.allclose(parts.cost(full[first] + full[second] - full[third]), whole, rtol=1e-9)


def test_the_border_counts_steps_to_what_lies_behind_it(picture: Reals) -> None:
    place = 40
    border = border_at(picture, place, GRID, SEARCH_PATCH)
    full = PARTS.of(picture[place][None])
    added = PARTS.cost(full, border) - PARTS.cost(full)
    image = (
        picture.reshape(GRID, GRID, 3, SEARCH_PATCH, SEARCH_PATCH)
        .transpose(2, 0, 3, 1, 4)
        .reshape(3, 96, 96)
    )
    top, left = SEARCH_PATCH * (place // GRID), SEARCH_PATCH * (place % GRID)
    bottom, right = top + SEARCH_PATCH, left + SEARCH_PATCH
    steps = (
        image[:, top, left:right] - image[:, top - 1, left:right],
        image[:, bottom, left:right] - image[:, bottom - 1, left:right],
        image[:, top:bottom, left] - image[:, top:bottom, left - 1],
        image[:, top:bottom, right] - image[:, top:bottom, right - 1],
    )
    expected = border.weight * sum(np.log1p(abs(step)).sum() for step in steps)
    assert np.isclose(float(added[0]), expected, rtol=1e-9)
    assert len(border_at(picture, 0, GRID, SEARCH_PATCH).inner) == 2 * 3 * SEARCH_PATCH


def test_the_form_touches_the_cost_and_is_not_below_it(picture: Reals) -> None:
    """Without pixels, and for differences of at least half a level."""
    full = PARTS.of(picture)
    weights = PARTS.curvature(full[3])
    waves, steps = full[:, :LENGTH], abs(full[:, LENGTH : len(weights)])

    def cost(row: int) -> Reals:
        return np.concatenate((np.log1p(waves[row] ** 2), GRADIENT * np.log1p(steps[row])))

    here, there = full[3, : len(weights)] ** 2, full[9, : len(weights)] ** 2
    bound = cost(3) + weights * (there - here)
    counted = np.concatenate((waves[3] > -np.inf, steps[3] >= 0.5))
    assert (bound - cost(9) >= -1e-9)[counted].all()


def test_exchanges_stay_in_the_lattice_and_end_where_none_pays(picture: Reals) -> None:
    patches = picture[MASKED]
    mixing = np.eye(8)
    for row, (more, less) in enumerate(((1, 2), (3, 5), (4, 0), (6, 7), (2, 5), (0, 1))):
        mixing[row] += mixing[more] - mixing[less]
    assert abs(round(np.linalg.det(mixing))) == 1
    found = exchanged(PARTS, mixing @ patches)
    combination = coefficients(found, patches)
    assert abs(round(np.linalg.det(combination))) == 1
    assert np.allclose(combination.sum(1), 1)
    cost = patch_cost(found, SEARCH_PATCH)
    for row in range(8):
        for i in range(8):
            for j in range(8):
                moves = [found[i] + found[j] - found[row]] if row not in (i, j) else []
                moves += [found[row] + found[i] - found[j]] if len({row, i, j}) == 3 else []
                for move in moves:
                    assert patch_cost(move[None], SEARCH_PATCH)[0] >= cost[row] - GAIN


def test_a_short_basis_generates_the_same_lattice(picture: Reals) -> None:
    patches = picture[MASKED]
    differences = patches[1:] - patches[:1]
    long = (np.tril(np.full((7, 7), 3.0), -1) + np.eye(7)) @ differences
    short, nearest = short_vectors(PARTS, long, patches[0] + 5 * differences[2])
    assert abs(round(np.linalg.det(coefficients(short, differences)))) == 1
    assert (np.linalg.norm(short, axis=1) < np.linalg.norm(long, axis=1).max()).all()
    assert coefficients(nearest[None], differences)[0, 2] >= 4


def test_combinations_of_many_patches_are_undone(picture: Reals, frame: Frame) -> None:
    """From this basis no exchange of single patches leads back."""
    patches = picture[MASKED]
    mixed = patches.copy()
    mixed[3] = patches[3] + 3 * patches[0] - 2 * patches[1] - 2 * patches[4] + patches[6]
    mixed[5] = patches[5] + 2 * patches[7] - 3 * patches[2] + patches[1]
    found = deepened(frame, mixed)
    assert {tuple(row) for row in found} == {tuple(row) for row in patches}
    phi = np.ones((len(found), 1))
    assert {tuple(row) for row in patch_basis(frame, np.hstack((found, phi)))} == {
        tuple(row) for row in patches
    }


def test_a_displaced_patch_comes_back(picture: Reals, frame: Frame) -> None:
    masked = picture[MASKED]
    moves = Moves.of(frame, PARTS, masked)
    displaced = picture[50] + masked[1] - masked[4] + masked[2] - masked[6]
    assert np.array_equal(moves.descended(displaced, picture[50]), picture[50])


def test_neighbours_correct_a_patch_whose_own_cost_misleads(picture: Reals, frame: Frame) -> None:
    """A patch is put where another one looks better by itself; its border tells."""
    masked, place = picture[MASKED], 52
    moves = Moves.of(frame, PARTS, masked)
    wrong = picture[place] + masked[0] - masked[3]
    members = np.full(len(picture), FREE)
    members[MASKED] = np.arange(len(MASKED))
    spoilt = picture.copy()
    spoilt[place] = wrong
    assert np.array_equal(continued(frame, masked, spoilt, members)[place], picture[place])
    members[place] = FIXED
    assert np.array_equal(continued(frame, masked, spoilt, members)[place], wrong)
    attracted = Border(np.arange(LENGTH), wrong, weight=50.0)
    assert np.array_equal(moves.descended(picture[place], wrong, attracted), wrong)


def test_a_masked_patch_is_not_moved_onto_another_one(picture: Reals, frame: Frame) -> None:
    """Which would leave the lattice: they would be the same patch twice."""
    masked = picture[MASKED]
    moves = Moves.of(frame, PARTS, masked)
    row, other = patch_cost(masked, SEARCH_PATCH).argsort()[[4, 0]]
    attracted = Border(np.arange(LENGTH), masked[other], weight=50.0)
    assert np.array_equal(moves.descended(masked[row], masked[row], attracted), masked[other])
    kept = moves.descended(masked[row], masked[row], attracted, member=int(row))
    assert coefficients(kept[None], masked)[0, row] == 1


# the exact attack on one upload: photographs through a small model, and when it falls back --------

SIDE, PIXEL_PATCH = 96, 16
CROPS = 4


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """36 patches of 16×16, float64."""
    shape = {"img_size": SIDE, "patch_size": PIXEL_PATCH, "embed_dim": 96, "num_heads": 4}
    return tiny_model(
        shape | {"depth": 1, "num_classes": 10, "mean": 0.5, "std": 0.5},
        weights="drawn",
        unknown_embedding=True,
    )


@pytest.fixture(scope="module")
def photographs() -> torch.Tensor:
    return torch.stack([i.image for i in load_images("embedded", size=SIDE, limit=CROPS)])


def attacked(
    attack: Attack, model: LoadedModel, images: torch.Tensor, setting: str
) -> tuple[Reconstruction, ClientInput]:
    ids = [str(index) for index in range(len(images))]
    labels = torch.zeros(len(images), dtype=torch.long)
    inputs = SETTINGS[setting].prepare(
        images, labels, ids, patch_size=PIXEL_PATCH, gamma=0.2, round=0, seed=0
    )
    update = FedSGDClient(model, ClientConfig()).update(inputs, names=list(attack.needs(model)))
    pixels = Pixels(SIDE, model.card.mean, model.card.std)
    view = AttackerView(model, [update], pixels, labels, SETTINGS[setting].against)
    assert attack.unsupported(view) is None
    return attack.run(view, generator=torch.Generator()), inputs


def test_one_upload_gives_photographs_back_bit_by_bit(
    model: LoadedModel, photographs: torch.Tensor
) -> None:
    found, inputs = attacked(PixelLattice(prior="stationary"), model, photographs, "c")
    assert inputs.mask.any(-1).all()
    exact = psnr(found.images.float(), photographs).isinf()
    assert int(exact.sum()) >= 3
    before, _ = attacked(MaskedSpan(prior="stationary"), model, photographs, "c")
    assert not psnr(before.images.float(), photographs).isinf().any()


def test_as_fed_the_unmasked_patches_are_exact_and_the_others_their_mean(
    model: LoadedModel, photographs: torch.Tensor
) -> None:
    from mjp_privacy.models.jigsaw import to_patches

    found, inputs = attacked(PixelLattice(prior="stationary"), model, photographs[:1], "b")
    ours, fed = (to_patches(i.double(), PIXEL_PATCH)[0] for i in (found.images, inputs.images))
    hidden = inputs.mask[0]
    assert torch.allclose(ours[~hidden], fed[~hidden], atol=1e-6)
    assert torch.allclose(ours[hidden], fed[hidden].mean(0).expand(int(hidden.sum()), -1))
    assert found.permutation is None


def test_pixels_that_are_no_grey_levels_fall_back_to_the_span(
    model: LoadedModel, photographs: torch.Tensor
) -> None:
    """A client that mixes or resamples after decoding."""
    mixed = 0.7 * photographs[:1] + 0.3 * photographs[1:2]
    found, _ = attacked(PixelLattice(prior="stationary"), model, mixed, "c")
    before, _ = attacked(MaskedSpan(prior="stationary"), model, mixed, "c")
    assert found.diagnostics["lattice_found"].tolist() == [0]
    assert torch.allclose(found.images, before.images)
