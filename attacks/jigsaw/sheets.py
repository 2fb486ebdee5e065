"""Sorts the patches of several pictures, whose places are known, into pictures: each must continue
its neighbours.

Groups of places in which it is decided which patches belong together grow by pairs of groups: first
the pair whose best matching of their pictures fits best beside how others would. So a border of two
flat patches, where any picture would do, is decided last, when others speak too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Reals = NDArray[np.float64]


def sorted_into_pictures(patches: Reals, patch_size: int) -> Reals:
    """Patches (N, B, p) of a square grid, B for each place in any order -> B pictures (B, N, p)."""
    count, batch = patches.shape[:2]
    edges = _edges(patches, patch_size)
    order = np.tile(np.arange(batch), (count, 1))  # which patch of a place is in each picture
    group = np.arange(count)
    while len(edges):
        joint: dict[tuple[int, int], Reals] = {}
        for (first, second), cost in edges.items():
            pair = group[first], group[second]
            own = cost[order[first]][:, order[second]]
            key, own = (pair, own) if pair[0] < pair[1] else (pair[::-1], own.T)
            joint[key] = joint.get(key, 0.0) + own
        (kept, added), matching = max(
            ((pair, _matched(cost)) for pair, cost in joint.items()), key=lambda item: item[1][1]
        )
        moved = group == added
        order[moved] = order[moved][:, matching[0]]
        group[moved] = kept
        edges = {pair: cost for pair, cost in edges.items() if group[pair[0]] != group[pair[1]]}
    return np.stack([patches[np.arange(count), order[:, picture]] for picture in range(batch)])


def _matched(cost: Reals) -> tuple[NDArray[np.int64], float]:
    """The best matching (B,) of costs (B, B), and how much better it is than the mean one."""
    rows, columns = linear_sum_assignment(cost)
    return columns, float(cost.mean() * len(cost) - cost[rows, columns].sum())


def _edges(patches: Reals, patch_size: int) -> dict[tuple[int, int], Reals]:
    """For each pair of neighbouring places how badly each patch of one continues each of the other,
    (B, B): the sum of log(1 + |step across the border|)."""
    count, batch = patches.shape[:2]
    grid = round(count**0.5)
    tiles = patches.reshape(count, batch, -1, patch_size, patch_size)
    costs = {}
    for place in range(count):
        beside, below = place % grid < grid - 1, place + grid < count
        sides = [(place + 1, tiles[place, ..., -1], tiles[place + 1, ..., 0])] if beside else []
        if below:
            sides.append((place + grid, tiles[place, ..., -1, :], tiles[place + grid, ..., 0, :]))
        for other, own, next_to in sides:
            costs[place, other] = np.log1p(abs(own[:, None] - next_to)).sum((2, 3))
    return costs
