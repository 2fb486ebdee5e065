"""Reconstructions of a batch are given to the pictures they fit, one to one."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from mjp_privacy.metrics.matching import EXACT, NOTHING, assigned


def by_all_orders(made: torch.Tensor, pictures: torch.Tensor) -> tuple[int, ...]:
    """The best order of all there are, with PSNR in NumPy."""

    def worth(place: int, at: int) -> float:
        error = float(np.mean((made[place].numpy() - pictures[at].numpy()) ** 2))
        if np.isnan(error):
            return NOTHING
        return EXACT if error == 0 else min(-10 * np.log10(error), EXACT)

    orders = itertools.permutations(range(len(made)))
    return max(orders, key=lambda order: sum(worth(p, at) for at, p in enumerate(order)))


def test_shuffled_pictures_are_put_back() -> None:
    pictures = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    assert torch.equal(assigned(pictures[order], pictures), order.argsort())


def test_the_sum_of_psnrs_is_the_largest_there_is() -> None:
    draws = torch.Generator().manual_seed(2)
    for _ in range(20):
        pictures = torch.rand(4, 3, 4, 4, generator=draws, dtype=torch.float64)
        made = torch.rand(4, 3, 4, 4, generator=draws, dtype=torch.float64)
        made = 0.5 * made + 0.5 * pictures[torch.randperm(4, generator=draws)]
        assert tuple(assigned(made, pictures).tolist()) == by_all_orders(made, pictures)


def test_two_that_fit_one_picture_do_not_both_get_it() -> None:
    pictures = torch.stack([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)])
    made = torch.stack([torch.full((3, 2, 2), 0.1), torch.full((3, 2, 2), 0.0)])
    assert assigned(made, pictures).tolist() == [1, 0]


def test_a_picture_that_is_not_finite_gets_what_is_left() -> None:
    pictures = torch.rand(3, 3, 2, 2, generator=torch.Generator().manual_seed(3))
    made = torch.stack([pictures[0] * torch.nan, pictures[0], pictures[1]])
    assert assigned(made, pictures).tolist() == [1, 2, 0]
