"""Which patch stands where, against all orders tried and neighbours counted one by one."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mjp_privacy.metrics.matching import (
    direct_accuracy,
    matched_patches,
    neighbour_accuracy,
    rearranged,
)
from mjp_privacy.models.jigsaw import to_images, to_patches

GRID, SIDE = 3, 4
PLACES = GRID * GRID


def pictures(count: int, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.rand((count, 3, GRID * SIDE, GRID * SIDE), generator=draws)


def masks(count: int, seed: int) -> Tensor:
    return torch.rand((count, PLACES), generator=torch.Generator().manual_seed(seed)) < 0.6


def test_the_matching_is_the_best_of_all_orders() -> None:
    """Two pictures that share nothing: of all orders of the masked patches, the least squares."""
    plain, images, mask = pictures(3, 0), pictures(3, 1), masks(3, 2)
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


def test_moved_patches_are_seen_and_moved_back() -> None:
    plain = pictures(1, 3)
    order = torch.tensor([0, 4, 2, 1, 3, 5, 8, 7, 6])
    moved = to_images(to_patches(plain, SIDE)[:, order], SIDE, 3)
    mask = torch.tensor([False, True, False, True, True, False, True, False, True])[None]
    placed = matched_patches(moved + 1e-3, plain, mask, SIDE)
    assert placed[0].tolist() == order.tolist()
    assert torch.equal(rearranged(moved, placed, SIDE), plain)
    assert direct_accuracy(placed, mask).item() == 0.0


def test_equal_patches_keep_their_places() -> None:
    plain = torch.full((1, 3, GRID * SIDE, GRID * SIDE), 0.5)
    placed = matched_patches(plain, plain, torch.ones(1, PLACES, dtype=torch.bool), SIDE)
    assert placed[0].tolist() == list(range(PLACES))


@pytest.mark.parametrize("seed", range(5))
def test_accuracies_are_counts(seed: int) -> None:
    draws = np.random.default_rng(seed)
    mask = masks(1, seed)
    placed = torch.arange(PLACES)
    hidden = mask[0].nonzero().flatten().numpy()
    few = hidden[: 2 + seed % 3]
    placed[few] = torch.as_tensor(draws.permutation(few))
    of_place = placed.tolist()
    own = [of_place[place] == place for place in hidden]
    assert direct_accuracy(placed[None], mask).item() == pytest.approx(np.mean(own))
    right = wrong = 0
    for place, (down, across) in itertools.product(range(PLACES), ((0, 1), (1, 0))):
        row, column = divmod(place, GRID)
        if row + down >= GRID or column + across >= GRID:
            continue
        other = place + GRID * down + across
        if not (mask[0, place] or mask[0, other]):
            continue
        here, there = (divmod(of_place[at], GRID) for at in (place, other))
        good = (here[0] + down, here[1] + across) == there
        right, wrong = right + good, wrong + (not good)
    assert neighbour_accuracy(placed[None], mask).item() == pytest.approx(right / (right + wrong))


def test_nothing_masked_is_no_share() -> None:
    none, placed = torch.zeros(1, PLACES, dtype=torch.bool), torch.arange(PLACES)[None]
    assert math.isnan(direct_accuracy(placed, none).item())
    assert math.isnan(neighbour_accuracy(placed, none).item())
