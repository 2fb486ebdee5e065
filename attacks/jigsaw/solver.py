"""Puts patches of unknown order back: a jigsaw whose frame is known.

The pieces are the image's patches at the masked positions, in any order; the other patches are
known. Wanted is the arrangement of least total border cost,

    E = sum over neighbouring positions (q right of or below p) of cost(piece at p, piece at q),

a quadratic assignment problem. It is grown inward from the known patches, improved by moves that
are each optimal, and then parts of it are taken out and grown again as long as E falls. No truth,
no learned weights; the same answer every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.jigsaw.borders import Cost, border_costs
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.seeding import derive_seed

Places = NDArray[np.int64]
Costs = NDArray[np.float64]
ROUNDS = 60  # parts taken out and grown again


def solve(
    known: Tensor,
    mask: Tensor,
    pieces: Tensor,
    *,
    grid: int,
    patch_size: int,
    cost: Cost = "mgc",
    rounds: int = ROUNDS,
) -> Tensor:
    """The pieces' order: a permutation (N,) with `shuffled[j] = plain[permutation[j]]`.

    known   (N, p) in [0, 1], the patches in row-major order; rows at masked positions are not read
    mask    (N,) bool, True where the patch is not known
    pieces  (k, p) in [0, 1]; the i-th is the shuffled image's patch at the i-th masked position

    So `plain[permutation] = shuffled` puts every piece where it fits; outside the mask
    `permutation[j] == j`. With nothing masked it is the identity; with everything masked there is
    no anchor, and the picture may come out displaced.
    """
    _check(known, mask, pieces, grid, patch_size)
    free = mask.nonzero().flatten().cpu().numpy()
    if len(free) < 2:
        return torch.arange(len(known))
    shuffled = known.detach().cpu().double().clone()
    shuffled[mask.cpu()] = pieces.detach().cpu().double()
    sideways, downwards = border_costs(shuffled, patch_size, cost)
    board = _Board.of(sideways.numpy(), downwards.numpy(), grid)
    where = torch.from_numpy(_arrange(board, free, rounds)[:-1])
    permutation = torch.empty_like(where)
    permutation[where] = torch.arange(len(where))
    return permutation


def oracle_assignment(pieces: Tensor, truth: Tensor) -> Tensor:
    """The bound no solver passes: (k,) index of the true patch for each piece, one to one.

    Least total squared error between pieces (k, p) and true patches (k, p).
    """
    error = (pieces.detach().double()[:, None] - truth.detach().double()).square().sum(-1)
    return torch.from_numpy(linear_sum_assignment(error.cpu().numpy())[1])


@dataclass(frozen=True)
class _Board:
    """Costs and neighbourhood. Piece N stands for "empty" and position N for "outside"."""

    costs: Costs  # (4, N+1, N): [side, piece on that side of the place, piece at the place]
    neighbours: Places  # (N, 4): right, left, below, above
    grid: int

    @staticmethod
    def of(sideways: Costs, downwards: Costs, grid: int) -> _Board:
        number = grid * grid
        empty = np.zeros((1, number))
        sides = (sideways.T, sideways, downwards.T, downwards)
        costs = np.stack([np.concatenate((side, empty)) for side in sides])
        frame = np.full((grid + 2, grid + 2), number)
        frame[1:-1, 1:-1] = np.arange(number).reshape(grid, grid)
        around = (frame[1:-1, 2:], frame[1:-1, :-2], frame[2:, 1:-1], frame[:-2, 1:-1])
        return _Board(costs, np.stack([side.ravel() for side in around], axis=1), grid)

    def at(self, arranged: Places, places: Places) -> Costs:
        """Cost (places, N) of each piece at each place beside what lies there now."""
        costs: Costs = self.costs[np.arange(4), arranged[self.neighbours[places]]].sum(1)
        return costs

    def energy(self, arranged: Places) -> float:
        """E; every border is met from both of its sides."""
        places = np.arange(len(self.neighbours))
        own = self.at(arranged, places)[places, arranged[:-1]]
        return float(own.sum()) / 2


def _arrange(board: _Board, free: Places, rounds: int) -> Places:
    """(N+1,) the piece at each position, the last entry standing for outside."""
    rng = np.random.default_rng(derive_seed("jigsaw solver", board.grid, len(free)))
    best: Places = np.arange(len(board.neighbours) + 1)
    pieces = best[free]
    best[free] = len(board.neighbours)
    best = _improve(board, _grow(board, best, free, pieces), free)
    energy = board.energy(best)
    for number in range(rounds):
        out = _part(board, best, free, number, rng)
        other = best.copy()
        other[out] = len(board.neighbours)
        other = _improve(board, _grow(board, other, out, best[out]), free)
        if (found := board.energy(other)) <= energy:
            best, energy = other, found
    return best


def _part(
    board: _Board, arranged: Places, free: Places, number: int, rng: np.random.Generator
) -> Places:
    """Positions to empty: a window about a bad place, and a fifth of the places, bad ones first."""
    cost = board.at(arranged, free)[np.arange(len(free)), arranged[free]] + 1e-9
    chance = cost / cost.sum()
    centre = rng.choice(free, p=chance)
    reach = rng.integers(1, 4 + number % 3)
    rows, columns = np.divmod(free, board.grid)
    row, column = np.divmod(centre, board.grid)
    window = free[(abs(rows - row) <= reach) & (abs(columns - column) <= reach)]
    return np.union1d(window, rng.choice(free, size=max(1, len(free) // 5), p=chance))


def _grow(board: _Board, arranged: Places, places: Places, pieces: Places) -> Places:
    """Fill empty places one by one: most neighbours first, and of these the clearest choice."""
    arranged, places, pieces = arranged.copy(), np.sort(places), np.sort(pieces)
    empty = len(board.neighbours)
    while len(places):
        known = (arranged[board.neighbours[places]] < empty).sum(1)
        edge = np.flatnonzero(known == known.max())
        costs = board.at(arranged, places[edge])[:, pieces]
        choice = 0
        if len(pieces) > 1 and known.max() > 0:
            best, second = np.partition(costs, 1, axis=1)[:, :2].T
            choice = int(((best + 1e-9) / (second + 1e-9)).argmin())
        place, piece = edge[choice], int(costs[choice].argmin())
        arranged[places[place]] = pieces[piece]
        places, pieces = np.delete(places, place), np.delete(pieces, piece)
    return arranged


def _improve(board: _Board, arranged: Places, free: Places) -> Places:
    """Reassign the masked places of one chessboard colour, then of the other, while E falls.

    Places of one colour do not touch, so each step is a linear assignment solved exactly; at the
    end, exchanges of any two places that do not touch.
    """
    arranged = arranged.copy()
    colour = (free // board.grid + free % board.grid) % 2
    halves = [free[colour == side] for side in (0, 1) if (colour == side).sum() > 1]
    energy = np.inf
    while (now := board.energy(arranged)) < energy - 1e-9:
        energy = now
        for places in halves:
            pieces = arranged[places]
            rows, columns = linear_sum_assignment(board.at(arranged, places)[:, pieces])
            arranged[places[rows]] = pieces[columns]
    return _exchange(board, arranged, free)


def _exchange(board: _Board, arranged: Places, free: Places) -> Places:
    touching = (board.neighbours[free][:, :, None] == free).any(1)
    for _ in range(4 * len(free)):
        pieces = arranged[free]
        costs = board.at(arranged, free)[:, pieces]
        own = costs.diagonal()
        gain = np.where(touching, 0.0, own[:, None] + own - costs - costs.T)
        one, other = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[one, other] <= 1e-9 * (1 + abs(own).max()):
            break
        arranged[free[one]], arranged[free[other]] = pieces[other], pieces[one]
    return arranged


def _check(known: Tensor, mask: Tensor, pieces: Tensor, grid: int, patch_size: int) -> None:
    number, masked = grid * grid, int(mask.sum())
    if known.shape[0] != number or mask.shape != (number,) or mask.dtype != torch.bool:
        raise UserError(
            f"The jigsaw solver takes {number} patches and a bool mask of them (grid {grid}); got "
            f"patches {tuple(known.shape)} and a {mask.dtype} mask {tuple(mask.shape)}."
        )
    if pieces.shape != (masked, known.shape[1]) or known.shape[1] % patch_size**2:
        raise UserError(
            f"The jigsaw solver takes one piece for each masked position, {masked} of "
            f"{known.shape[1]} numbers (a multiple of {patch_size}²); got {tuple(pieces.shape)}."
        )
