"""Moves among lattice patches, and their costs: against sums made anew and planted patches."""

import numpy as np
import pytest
import torch

from attacks.lattice.cost import GRADIENT, Border, Frame, Parts, Reals, patch_cost
from attacks.lattice.search import (
    GAIN,
    Moves,
    deepened,
    evened,
    exchanged,
    patch_basis,
    short_vectors,
)
from attacks.lattice.unmixing import FIXED, FREE, border_at, continued
from mjp_privacy.data import load_images
from mjp_privacy.models.jigsaw import to_patches

PATCH, GRID, LENGTH = 8, 12, 192
PARTS = Parts(LENGTH, PATCH)
MASKED = np.array([26, 31, 40, 66, 77, 90, 103, 118])  # of 144, scattered


@pytest.fixture(scope="module")
def picture() -> Reals:
    """(144, 192) grey levels: a photograph in its places."""
    image = next(iter(load_images("embedded", size=96, limit=1))).image
    return np.rint(255 * to_patches(image, PATCH).double().numpy())


@pytest.fixture(scope="module")
def frame(picture: Reals) -> Frame:
    """Of the span of the MASKED patches, with mean and std 1/2."""
    centred = torch.from_numpy(picture[MASKED] / 127.5 - 1)
    wide = torch.nn.functional.pad(centred, (0, 1), value=1.0)
    return Frame.of(torch.linalg.qr(wide.mT)[0].mT, (0.5,) * 3, (0.5,) * 3, PATCH)


def coefficients(vectors: Reals, basis: Reals) -> Reals:
    """Integers C with vectors = C basis."""
    solved = np.linalg.lstsq(basis.T, vectors.T, rcond=None)[0].T
    assert np.allclose(solved @ basis, vectors, atol=1e-5)
    assert np.allclose(solved, np.rint(solved), atol=1e-6)
    return np.rint(solved)


@pytest.mark.parametrize("waves", [True, False])
def test_costs_of_sums_are_those_of_the_whole_patches(picture: Reals, waves: bool) -> None:
    parts = Parts(LENGTH, PATCH, waves)
    full = parts.of(picture)
    rng = np.random.default_rng(0)
    first, second, third = rng.integers(0, len(picture), (3, 50))
    sums = picture[first] + picture[second] - picture[third]
    whole = patch_cost(sums, PATCH)
    if not waves:
        tiles = sums.reshape(50, 3, PATCH, PATCH)
        steps = (np.diff(tiles, axis=2), np.diff(tiles, axis=3))
        whole = sum(np.log1p(abs(step)).sum((1, 2, 3)) for step in steps)
        whole += 5 * (np.maximum(-sums, 0) + np.maximum(sums - 255, 0)).sum(1)
    assert np.allclose(parts.cost(full[first] + full[second] - full[third]), whole, rtol=1e-9)


def test_the_border_counts_steps_to_what_lies_behind_it(picture: Reals) -> None:
    place = 40
    border = border_at(picture, place, GRID, PATCH)
    full = PARTS.of(picture[place][None])
    added = PARTS.cost(full, border) - PARTS.cost(full)
    image = picture.reshape(GRID, GRID, 3, PATCH, PATCH).transpose(2, 0, 3, 1, 4).reshape(3, 96, 96)
    top, left = PATCH * (place // GRID), PATCH * (place % GRID)
    bottom, right = top + PATCH, left + PATCH
    steps = (
        image[:, top, left:right] - image[:, top - 1, left:right],
        image[:, bottom, left:right] - image[:, bottom - 1, left:right],
        image[:, top:bottom, left] - image[:, top:bottom, left - 1],
        image[:, top:bottom, right] - image[:, top:bottom, right - 1],
    )
    expected = border.weight * sum(np.log1p(abs(step)).sum() for step in steps)
    assert np.isclose(float(added[0]), expected, rtol=1e-9)
    assert len(border_at(picture, 0, GRID, PATCH).inner) == 2 * 3 * PATCH


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
    cost = patch_cost(found, PATCH)
    for row in range(8):
        for i in range(8):
            for j in range(8):
                moves = [found[i] + found[j] - found[row]] if row not in (i, j) else []
                moves += [found[row] + found[i] - found[j]] if len({row, i, j}) == 3 else []
                for move in moves:
                    assert patch_cost(move[None], PATCH)[0] >= cost[row] - GAIN


def test_a_short_basis_generates_the_same_lattice(picture: Reals) -> None:
    patches = picture[MASKED]
    differences = patches[1:] - patches[:1]
    long = (np.tril(np.full((7, 7), 3.0), -1) + np.eye(7)) @ differences
    short, nearest = short_vectors(PARTS, long, patches[0] + 5 * differences[2])
    assert abs(round(np.linalg.det(coefficients(short, differences)))) == 1
    assert (np.linalg.norm(short, axis=1) < np.linalg.norm(long, axis=1).max()).all()
    assert coefficients(nearest[None], differences)[0, 2] >= 4


def test_another_basis_of_patches_generates_the_same_lattice(picture: Reals) -> None:
    combination = coefficients(evened(PARTS, picture[MASKED]), picture[MASKED])
    assert abs(round(np.linalg.det(combination))) == 1
    assert np.allclose(combination.sum(1), 1)


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


def test_one_masked_patch_leaves_no_moves(picture: Reals, frame: Frame) -> None:
    """What is known but for the differences of one patch is known."""
    moves = Moves.of(frame, PARTS, picture[MASKED[:1]])
    assert np.array_equal(moves.descended(picture[50], picture[51]), picture[50])


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
    row, other = patch_cost(masked, PATCH).argsort()[[4, 0]]
    attracted = Border(np.arange(LENGTH), masked[other], weight=50.0)
    assert np.array_equal(moves.descended(masked[row], masked[row], attracted), masked[other])
    kept = moves.descended(masked[row], masked[row], attracted, member=int(row))
    assert coefficients(kept[None], masked)[0, row] == 1
