"""Puts patches of unknown order back: a jigsaw puzzle with some of its pieces already in place.

The pieces are the image's patches at the masked positions, in any order; the other patches are
known. The solution is the arrangement of least total border cost,

    E = sum over neighbouring positions (q right of or below p) of cost(piece at p, piece at q),

a quadratic assignment problem. An arrangement is grown inward from the known patches and improved
by moves that are each optimal; then parts of it are taken out and grown again, ROUNDS times, and
kept where E does not rise. It uses neither the truth nor learned weights, and its random choices
are seeded, so the same input gives the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.budget import spent
from attacks.jigsaw.borders import Cost, border_costs
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed

Places = NDArray[np.int64]
Costs = NDArray[np.float64]
ROUNDS = 160  # times that a part is taken out and grown again; 60 left pairs of pieces exchanged


def solve(
    patches: Tensor,
    mask: Tensor,
    pieces: Tensor,
    *,
    grid: int,
    patch_size: int,
    cost: Cost = "mgc",
    rounds: int = ROUNDS,
) -> Tensor:
    """The pieces' order: a permutation (N,) with `shuffled[j] = plain[permutation[j]]`.

    patches  (N, p) in [0, 1] in row-major order; rows at masked positions are not read
    mask     (N,) bool, True where the patch is not known
    pieces   (k, p) in [0, 1]; the i-th is the shuffled image's patch at the i-th masked position
    cost     how borders are compared, see `jigsaw.borders`
    rounds   times that a part of the arrangement is taken out and grown again

    So `plain[permutation] = shuffled` puts every piece where it fits; outside the mask
    `permutation[j] == j`. With nothing masked it is the identity; with everything masked no known
    patch fixes the position, and the picture may come out displaced.
    """
    _check(patches, mask, pieces, grid, patch_size)
    free = mask.nonzero().flatten().cpu().numpy()
    if len(free) < 2:
        return torch.arange(len(patches))
    shuffled = patches.detach().cpu().double().clone()
    shuffled[mask.cpu()] = pieces.detach().cpu().double()
    sideways, downwards = border_costs(shuffled, patch_size, cost)
    board = _Board.of(sideways.numpy(), downwards.numpy(), grid)
    arranged = torch.from_numpy(_arrange(board, free, rounds)[:-1])
    permutation = torch.empty_like(arranged)
    permutation[arranged] = torch.arange(len(arranged))
    return permutation


@dataclass(frozen=True)
class _Board:
    """Border costs and neighbours. Piece N means "no piece" and position N "outside the grid"."""

    costs: Costs  # (4, N+1, N): [side, piece on that side of the place, piece at the place]
    neighbours: Places  # (N, 4): right, left, below, above
    grid: int

    @staticmethod
    def of(sideways: Costs, downwards: Costs, grid: int) -> _Board:
        """The board of a square grid, from the costs of pairs: a left of b, and a above b."""
        number = grid * grid
        empty = np.zeros((1, number))
        sides = (sideways.T, sideways, downwards.T, downwards)
        costs = np.stack([np.concatenate((side, empty)) for side in sides])
        frame = np.full((grid + 2, grid + 2), number)
        frame[1:-1, 1:-1] = np.arange(number).reshape(grid, grid)
        around = (frame[1:-1, 2:], frame[1:-1, :-2], frame[2:, 1:-1], frame[:-2, 1:-1])
        return _Board(costs, np.stack([side.ravel() for side in around], axis=1), grid)

    def at(self, arranged: Places, places: Places) -> Costs:
        """Cost (places, N) of putting each piece at each place, beside its present neighbours."""
        costs: Costs = self.costs[np.arange(4), arranged[self.neighbours[places]]].sum(1)
        return costs

    def energy(self, arranged: Places) -> float:
        """E, the total border cost: half of the sum, because both sides count every border."""
        places = np.arange(len(self.neighbours))
        cost = self.at(arranged, places)[places, arranged[:-1]]
        return float(cost.sum()) / 2


def _arrange(board: _Board, free: Places, rounds: int) -> Places:
    """The best arrangement found: (N+1,) the piece at each position, the last entry for outside."""
    rng = np.random.default_rng(derive_seed("jigsaw solver", board.grid, len(free)))
    best: Places = np.arange(len(board.neighbours) + 1)
    pieces = best[free]
    best[free] = len(board.neighbours)
    best = _improve(board, _grow(board, best, free, pieces), free)
    energy = board.energy(best)
    for number in range(rounds):
        if spent():
            break
        emptied = _part(board, best, free, number, rng)
        trial = best.copy()
        trial[emptied] = len(board.neighbours)
        trial = _improve(board, _grow(board, trial, emptied, best[emptied]), free)
        if (trial_energy := board.energy(trial)) <= energy:
            best, energy = trial, trial_energy
    return best


def _part(
    board: _Board, arranged: Places, free: Places, number: int, rng: np.random.Generator
) -> Places:
    """Positions to empty: a window about a costly place, and a fifth of all, drawn by cost."""
    cost = board.at(arranged, free)[np.arange(len(free)), arranged[free]] + 1e-9
    chance = cost / cost.sum()
    centre = rng.choice(free, p=chance)
    reach = rng.integers(1, 4 + number % 3)
    rows, columns = np.divmod(free, board.grid)
    row, column = np.divmod(centre, board.grid)
    window = free[(abs(rows - row) <= reach) & (abs(columns - column) <= reach)]
    return np.union1d(window, rng.choice(free, size=max(1, len(free) // 5), p=chance))


def _grow(board: _Board, arranged: Places, places: Places, pieces: Places) -> Places:
    """Fill the empty places one by one: those with most neighbours first, and of these the place
    whose best piece stands out most from the second best."""
    arranged, places, pieces = arranged.copy(), np.sort(places), np.sort(pieces)
    empty = len(board.neighbours)
    while len(places):
        filled = (arranged[board.neighbours[places]] < empty).sum(1)
        edge = np.flatnonzero(filled == filled.max())
        costs = board.at(arranged, places[edge])[:, pieces]
        choice = 0
        if len(pieces) > 1 and filled.max() > 0:
            best, second = np.partition(costs, 1, axis=1)[:, :2].T
            choice = int(((best + 1e-9) / (second + 1e-9)).argmin())
        place, piece = edge[choice], int(costs[choice].argmin())
        arranged[places[place]] = pieces[piece]
        places, pieces = np.delete(places, place), np.delete(pieces, piece)
    return arranged


def _improve(board: _Board, arranged: Places, free: Places) -> Places:
    """Reassign the masked places of one chessboard colour, then of the other, while E falls.

    Places of one colour do not touch, so each step is a linear assignment that is solved exactly.
    At the end pairs of places are exchanged, which reaches across the colours.
    """
    arranged = arranged.copy()
    colour = (free // board.grid + free % board.grid) % 2
    halves = [free[colour == side] for side in (0, 1) if (colour == side).sum() > 1]
    energy = np.inf
    while (now := board.energy(arranged)) < energy - 1e-9 and not spent():
        energy = now
        for places in halves:
            pieces = arranged[places]
            rows, columns = linear_sum_assignment(board.at(arranged, places)[:, pieces])
            arranged[places[rows]] = pieces[columns]
    return _exchange(board, arranged, free)


def _exchange(board: _Board, arranged: Places, free: Places) -> Places:
    """Exchange the two pieces that lower E most, while any exchange does.

    Places that touch are left out: their costs change together, so the gain below would be wrong.
    """
    touching = (board.neighbours[free][:, :, None] == free).any(1)
    for _ in range(4 * len(free)):
        if spent():
            break
        pieces = arranged[free]
        costs = board.at(arranged, free)[:, pieces]
        present = costs.diagonal()
        gain = np.where(touching, 0.0, present[:, None] + present - costs - costs.T)
        first, second = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[first, second] <= 1e-9 * (1 + abs(present).max()):
            break
        arranged[free[first]], arranged[free[second]] = pieces[second], pieces[first]
    return arranged


def _check(patches: Tensor, mask: Tensor, pieces: Tensor, grid: int, patch_size: int) -> None:
    """Raise UserError unless the shapes of the arguments of `solve` fit together."""
    number, masked = grid * grid, int(mask.sum())
    if patches.shape[0] != number or mask.shape != (number,) or mask.dtype != torch.bool:
        raise UserError(
            f"The jigsaw solver takes {number} patches and as long a bool mask (grid {grid}); "
            f"got patches {tuple(patches.shape)} and a {mask.dtype} mask {tuple(mask.shape)}."
        )
    if pieces.shape != (masked, patches.shape[1]) or patches.shape[1] % patch_size**2:
        raise UserError(
            f"The jigsaw solver takes one piece for each masked position, {masked} of "
            f"{patches.shape[1]} numbers (a multiple of {patch_size}²); got {tuple(pieces.shape)}."
        )
