"""Which picture, and which patch, belongs to which: against all orders tried."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mjp_privacy.metrics.matching import (
    assigned,
    direct_accuracy,
    matched_patches,
    neighbour_accuracy,
    rearranged,
)
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models.jigsaw import Grid, to_images, to_patches

GRID, SIDE = 3, 4
PLACES = GRID * GRID


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_pictures_get_the_largest_sum_of_psnrs_there_is() -> None:
    draws = torch.Generator().manual_seed(2)
    for _ in range(20):
        pictures, made = torch.rand(2, 4, 3, 4, 4, generator=draws, dtype=torch.float64)
        made = 0.5 * made + 0.5 * pictures[torch.randperm(4, generator=draws)]
        orders = torch.tensor([*itertools.permutations(range(4))])
        sums = torch.stack([psnr(made[order], pictures).sum() for order in orders])
        assert torch.equal(assigned(made, pictures), orders[sums.argmax()])
    order = torch.tensor([3, 0, 2, 1])
    assert torch.equal(assigned(pictures[order], pictures), order.argsort())
    made = torch.stack([pictures[0] * torch.nan, *pictures[:3]])  # NaN gets what is left
    assert assigned(made, pictures).tolist() == [1, 2, 3, 0]


def test_patches_get_the_least_squares_of_all_orders() -> None:
    plain, images = drawn(2, 3, 3, GRID * SIDE, GRID * SIDE)
    mask = drawn(3, PLACES, seed=2) < 0.6
    placed = matched_patches(images, plain, mask, SIDE)
    for at, hidden in enumerate(mask):
        places = hidden.nonzero().flatten().tolist()
        seen, true = (to_patches(x[at : at + 1].double(), SIDE)[0] for x in (images, plain))
        best = min(
            itertools.permutations(places),
            key=lambda order: float((seen[places] - true[list(order)]).square().sum()),
        )
        assert placed[at, places].tolist() == list(best)
        assert placed[at, ~hidden].tolist() == (~hidden).nonzero().flatten().tolist()


def test_moved_patches_are_seen_and_moved_back_and_equal_ones_stay() -> None:
    plain = drawn(1, 3, GRID * SIDE, GRID * SIDE)
    order = torch.tensor([0, 4, 2, 1, 3, 5, 8, 7, 6])
    moved = to_images(to_patches(plain, SIDE)[:, order], Grid(GRID, GRID), SIDE)
    mask = torch.tensor([False, True, False, True, True, False, True, False, True])[None]
    placed = matched_patches(moved + 1e-3, plain, mask, SIDE)
    assert placed[0].tolist() == order.tolist()
    assert torch.equal(rearranged(moved, placed, SIDE), plain)
    equal, everywhere = torch.full_like(plain, 0.5), torch.ones(1, PLACES, dtype=torch.bool)
    placed = matched_patches(equal, equal, everywhere, SIDE)
    assert placed[0].tolist() == list(range(PLACES))
    assert math.isnan(direct_accuracy(placed, ~everywhere).item())
    assert math.isnan(neighbour_accuracy(placed, ~everywhere, Grid(GRID, GRID)).item())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("grid", [Grid(GRID, GRID), Grid(2, 5)])
def test_accuracies_are_counts(grid: Grid, seed: int) -> None:
    mask, placed = drawn(1, grid.patches, seed=seed) < 0.6, torch.arange(grid.patches)
    hidden = mask[0].nonzero().flatten().numpy()
    few = hidden[: 2 + seed % 3]
    placed[few] = torch.as_tensor(np.random.default_rng(seed).permutation(few))
    of_place = placed.tolist()
    own = [of_place[place] == place for place in hidden]
    assert direct_accuracy(placed[None], mask).item() == pytest.approx(np.mean(own))
    good = []
    for place, (down, across) in itertools.product(range(grid.patches), ((0, 1), (1, 0))):
        row, column = divmod(place, grid.columns)
        other = place + grid.columns * down + across
        inside = row + down < grid.rows and column + across < grid.columns
        if inside and (mask[0, place] or mask[0, other]):
            here, there = (divmod(of_place[at], grid.columns) for at in (place, other))
            good.append((here[0] + down, here[1] + across) == there)
    found = neighbour_accuracy(placed[None], mask, grid)
    assert found.item() == pytest.approx(np.mean(good))
