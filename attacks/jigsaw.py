"""Puts patches of unknown order back: jigsaw puzzles by what continues what.

**Borders.** With l the last and l' the last but one column of the left patch, and r the first of
the right one (P pixels of C channels each), a border costs the Mahalanobis gradient compatibility
(Gallagher, CVPR 2012): the step r - l against the mean and covariance over the P rows of the left
patch's own last step l - l', plus the same from the right patch; here its square root, divided by
the cost of the third best patch for the same place, so that a flat patch, which fits everywhere,
does not outweigh a textured one.

**One picture** (`solve`), some of whose pieces are in place. The arrangement of least total cost,

    E = sum over neighbouring positions (q right of or below p) of cost(piece at p, piece at q),

is grown inward from the known patches and improved by moves that are each optimal; then parts of it
are taken out and grown again, ROUNDS times, and kept where E does not rise. Random choices are
seeded, so the same input gives the same answer.

**Several pictures** (`sorted_into_pictures`) whose patches' places are known. Groups of places in
which it is decided which patches belong together grow by pairs: first the pair whose best matching
fits best beside how others would, so that a border of two flat patches is decided last.

**Laid on one another**: searches for the same pictures may differ in ways that an upload cannot
tell, and a mean over them is a blur. So a result is first laid on the reference: pictures of the
same label and masked patches by assignment, shifts by whole pixels, at most REACH each way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.budget import spent
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.models.jigsaw import Grid, to_images, to_patches

RIVAL = 3  # the rank of the fit that sets the scale
LEVEL = 1 / 255  # one grey level
SMALLEST = 0.02  # share of the median scale added, for patches with several perfect fits


def border_costs(patches: Tensor, patch_size: int) -> tuple[Tensor, Tensor]:
    """Costs of every pair (a, b) of patches, (N, N) each: a left of b, and a above b.

    patches (N, C*P*P) in [0, 1].
    """
    tiles = patches.double().unflatten(-1, (-1, patch_size, patch_size))
    sideways = tiles.permute(0, 2, 3, 1)  # (N, row, column, channel)
    return _costs(sideways), _costs(sideways.transpose(1, 2))


def _costs(tiles: Tensor) -> Tensor:
    """The cost of a left of b for tiles (N, P rows, P columns, C) -> (N, N)."""
    step = tiles[None, :, :, 0] - tiles[:, None, :, -1]  # (a, b, P, C)
    # With one column there is no inner step: it counts as zero, and only the dummies matter.
    inner = min(2, tiles.shape[2])
    left = _mahalanobis(tiles[:, :, -1] - tiles[:, :, -inner], step)
    right = _mahalanobis(tiles[:, :, 0] - tiles[:, :, inner - 1], -step.transpose(0, 1))
    cost = (left + right.T).sqrt()
    # Over the third best of its row or of its column, whichever is smaller.
    rank = min(RIVAL, len(cost))
    rivals = cost + torch.diag(torch.full_like(cost[0], torch.inf))
    rows, columns = rivals.kthvalue(rank, 1).values, rivals.kthvalue(rank, 0).values
    scale = torch.minimum(rows[:, None], columns[None])
    scale = torch.where(scale.isfinite(), scale, 1.0)  # fewer patches than rivals
    return cost / (SMALLEST * scale.median() + LEVEL**2 + scale)


def _mahalanobis(inner: Tensor, step: Tensor) -> Tensor:
    """Squared Mahalanobis length of steps (a, b, P, C) given inner steps (a, P, C) -> (a, b)."""
    channels = inner.shape[-1]
    unit = torch.eye(channels).to(inner)
    grey = torch.ones(1, channels).to(inner)
    # Gallagher's dummy gradients of one grey level keep the covariance regular on flat patches.
    dummies = LEVEL * torch.cat((0 * grey, grey, -grey, unit, -unit))
    samples = torch.cat((inner, dummies.expand(len(inner), -1, -1)), dim=1)
    centred = samples - samples.mean(1, keepdim=True)
    covariance = centred.mT @ centred / (samples.shape[1] - 1)
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance))
    distance = torch.einsum("aij,abpj->abpi", whiten, step - inner.mean(1)[:, None, None])
    return distance.square().sum((-1, -2))


# one puzzle with known pieces ---------------------------------------------------------------------


Places = NDArray[np.int64]
Costs = NDArray[np.float64]
ROUNDS = 160  # times that a part is taken out and grown again; 60 left pairs of pieces exchanged


def solve(patches: Tensor, mask: Tensor, pieces: Tensor, *, grid: Grid, patch_size: int) -> Tensor:
    """The pieces' order: a permutation (N,) with `shuffled[j] = plain[permutation[j]]`.

    patches  (N, p) in [0, 1] in row-major order; rows at masked positions are not read
    mask     (N,) bool, True where the patch is not known
    pieces   (k, p) in [0, 1]; the i-th is the shuffled image's patch at the i-th masked position

    So `plain[permutation] = shuffled` puts every piece where it fits; outside the mask
    `permutation[j] == j`. With nothing masked it is the identity; with everything masked no known
    patch fixes the position, and the picture may come out displaced.
    """
    free = mask.nonzero().flatten().cpu().numpy()
    if len(free) < 2:
        return torch.arange(len(patches))
    shuffled = patches.detach().cpu().double().clone()
    shuffled[mask.cpu()] = pieces.detach().cpu().double()
    sideways, downwards = border_costs(shuffled, patch_size)
    empty = np.zeros((1, grid.patches))
    sides = (sideways.mT, sideways, downwards.mT, downwards)
    costs = np.stack([np.concatenate((side.numpy(), empty)) for side in sides])
    board = _Board(costs, _neighbours(grid), grid)
    arranged = torch.from_numpy(_arrange(board, free)[:-1])
    permutation = torch.empty_like(arranged)
    permutation[arranged] = torch.arange(len(arranged))
    return permutation


@dataclass(frozen=True)
class _Board:
    """Border costs and neighbours. Piece N means "no piece" and position N "outside the grid"."""

    costs: Costs  # (4, N+1, N): [side, piece on that side of the place, piece at the place]
    neighbours: Places  # (N, 4): right, left, below, above
    grid: Grid

    def at(self, arranged: Places, places: Places) -> Costs:
        """Cost (places, N) of putting each piece at each place, beside its present neighbours."""
        costs: Costs = self.costs[np.arange(4), arranged[self.neighbours[places]]].sum(1)
        return costs

    def energy(self, arranged: Places) -> float:
        """E, the total border cost: half of the sum, because both sides count every border."""
        places = np.arange(len(self.neighbours))
        cost = self.at(arranged, places)[places, arranged[:-1]]
        return float(cost.sum()) / 2


def _neighbours(grid: Grid) -> Places:
    """The neighbours (N, 4) of every place of a grid."""
    frame = np.pad(np.arange(grid.patches).reshape(grid), 1, constant_values=grid.patches)
    around = (frame[1:-1, 2:], frame[1:-1, :-2], frame[2:, 1:-1], frame[:-2, 1:-1])
    return np.stack([side.ravel() for side in around], axis=1)


def _arrange(board: _Board, free: Places) -> Places:
    """The best arrangement found: (N+1,) the piece at each position, the last entry for outside."""
    rng = np.random.default_rng(derive_seed("jigsaw solver", board.grid.seed, len(free)))
    best: Places = np.arange(len(board.neighbours) + 1)
    pieces = best[free]
    best[free] = len(board.neighbours)
    if len(free) == len(board.neighbours):
        trials = []
        for first in range(len(best) - 1):
            trials.append(_grown_from(board, first))
            if spent():
                break
        best = min(trials, key=board.energy)
    else:
        best = _grow(board, best, free, pieces)
    best = _improve(board, best, free)
    energy = board.energy(best)
    for number in range(ROUNDS):
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
    rows, columns = np.divmod(free, board.grid.columns)
    row, column = np.divmod(centre, board.grid.columns)
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
        choice, piece = _surest(costs if filled.max() > 0 else costs[:1])
        place = edge[choice]
        arranged[places[place]] = pieces[piece]
        places, pieces = np.delete(places, place), np.delete(pieces, piece)
    return arranged


def _grown_from(board: _Board, first: int) -> Places:
    """The arrangement (N+1,) that grows from this piece where no place is known, within a window
    of the grid's size: on a canvas of almost four times that, for nothing says which part of the
    picture the first piece is."""
    number, grid = len(board.neighbours), board.grid
    large = Grid(2 * grid.rows - 1, 2 * grid.columns - 1)
    canvas = replace(board, neighbours=_neighbours(large), grid=large)
    rows, columns = np.divmod(np.arange(large.patches), large.columns)
    arranged = np.full(large.patches + 1, number)
    arranged[large.patches // 2] = first
    left = np.delete(np.arange(number), first)
    low = high = np.array([grid.rows - 1, grid.columns - 1])  # the corners of what is filled
    while len(left):
        inside = (rows > high[0] - grid.rows) & (rows < low[0] + grid.rows)
        inside &= (columns > high[1] - grid.columns) & (columns < low[1] + grid.columns)
        beside = (arranged[canvas.neighbours] < number).sum(1)
        beside[~inside | (arranged[:-1] < number)] = 0
        edge = np.flatnonzero(beside == beside.max())
        at, piece = _surest(canvas.at(arranged, edge)[:, left])
        place = edge[at]
        arranged[place] = left[piece]
        left = np.delete(left, piece)
        corner = np.array([rows[place], columns[place]])
        low, high = np.minimum(low, corner), np.maximum(high, corner)
    return np.append(arranged[:-1][arranged[:-1] < number], number)


def _surest(costs: Costs) -> tuple[int, int]:
    """The place and the piece whose cost stands out most from that place's second best."""
    if costs.shape[1] == 1:
        return 0, 0
    best, second = np.partition(costs, 1, axis=1)[:, :2].T
    place = int(((best + 1e-9) / (second + 1e-9)).argmin())
    return place, int(costs[place].argmin())


def _improve(board: _Board, arranged: Places, free: Places) -> Places:
    """Reassign the masked places of one chessboard colour, then of the other, while E falls.

    Places of one colour do not touch, so each step is a linear assignment that is solved exactly.
    At the end pairs of places are exchanged, which reaches across the colours.
    """
    arranged = arranged.copy()
    colour = np.add(*np.divmod(free, board.grid.columns)) % 2
    halves = [free[colour == side] for side in (0, 1) if (colour == side).sum() > 1]
    energy = np.inf
    while (now := board.energy(arranged)) < energy - 1e-9 and not spent():
        energy = now
        for places in halves:
            pieces = arranged[places]
            rows, columns = scipy.optimize.linear_sum_assignment(
                board.at(arranged, places)[:, pieces]
            )
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


# several pictures at once -------------------------------------------------------------------------


Reals = NDArray[np.float64]


def sorted_into_pictures(patches: Reals, grid: Grid, patch_size: int) -> Reals:
    """Patches (N, B, p), B for each place in any order -> B pictures (B, N, p)."""
    count, batch = patches.shape[:2]
    edges = _edges(patches, grid, patch_size)
    order = np.tile(np.arange(batch), (count, 1))  # which patch of a place is in each picture
    group = np.arange(count)
    while len(edges):
        joint: dict[tuple[int, int], Reals] = {}
        for (first, second), cost in edges.items():
            pair = group[first], group[second]
            own = cost[order[first]][:, order[second]]
            key, own = (pair, own) if pair[0] < pair[1] else (pair[::-1], own.T)
            joint[key] = joint.get(key, 0.0) + own
        matched, better = {}, {}  # the best matching, and how much better it is than the mean one
        for pair, cost in joint.items():
            rows, matched[pair] = scipy.optimize.linear_sum_assignment(cost)
            better[pair] = float(cost.mean() * len(cost) - cost[rows, matched[pair]].sum())
        kept, added = max(better, key=better.__getitem__)
        moved = group == added
        order[moved] = order[moved][:, matched[kept, added]]
        group[moved] = kept
        edges = {pair: cost for pair, cost in edges.items() if group[pair[0]] != group[pair[1]]}
    return np.stack([patches[np.arange(count), order[:, picture]] for picture in range(batch)])


def _edges(patches: Reals, grid: Grid, patch_size: int) -> dict[tuple[int, int], Reals]:
    """For each pair of neighbouring places how badly each patch of one continues each of the other,
    (B, B): the sum of log(1 + |step across the border|)."""
    count, batch = patches.shape[:2]
    across = grid.columns
    tiles = patches.reshape(count, batch, -1, patch_size, patch_size)
    costs = {}
    for place in range(count):
        beside, below = place % across < across - 1, place + across < count
        sides = [(place + 1, tiles[place, ..., -1], tiles[place + 1, ..., 0])] if beside else []
        if below:
            sides.append(
                (place + across, tiles[place, ..., -1, :], tiles[place + across, ..., 0, :])
            )
        for other, own, next_to in sides:
            costs[place, other] = np.log1p(abs(own[:, None] - next_to)).sum((2, 3))
    return costs


# pictures laid on one another ---------------------------------------------------------------------


REACH = 2  # pixels


def in_the_order_of(pictures: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """Pictures (B, C, H, W) of equal labels exchanged so that each is nearest its reference."""
    placed = pictures.clone()
    for label in labels.unique():
        same = (labels == label).nonzero().flatten()
        placed[same] = pictures[same][_nearest_of(pictures[same], reference[same])]
    return placed


def placed_as(picture: Tensor, reference: Tensor, mask: Tensor, patch_size: int) -> Tensor:
    """A picture (C, H, W) whose masked patches (N,) are exchanged so that each is nearest that of
    the reference in its place."""
    patches, targets = (to_patches(image, patch_size) for image in (picture, reference))
    order = _nearest_of(patches[mask], targets[mask])
    patches = patches.clone()
    patches[mask] = patches[mask][order]
    return to_images(patches, Grid.in_pictures(picture, patch_size), patch_size)


def shifted_onto(picture: Tensor, reference: Tensor, reach: int = REACH) -> Tensor:
    """A picture (C, H, W) moved by the whole pixels that bring it nearest to the reference, in mean
    squared distance where both are; what moves in from outside is the reference's."""
    sides, far = picture.shape[-2:], torch.inf
    nearest = picture
    moves = sorted(range(-reach, reach + 1), key=abs)  # of equal distances, the smallest move
    for down in moves:
        for right in moves:
            rows, columns = map(_shifted, sides, (down, right))
            above, left = map(_shifted, sides, (-down, -right))
            moved = picture[..., above, left]
            distance = float((moved - reference[..., rows, columns]).square().mean())
            if distance < far:
                far, nearest = distance, reference.clone()
                nearest[..., rows, columns] = moved
    return nearest


def _shifted(side: int, by: int) -> slice:
    return slice(max(0, by), side + min(0, by))


def _nearest_of(values: Tensor, targets: Tensor) -> Tensor:
    """Which of the values (k, …) goes to each target (k, …), by least squared distance in all."""
    cost = torch.cdist(targets.flatten(1).double(), values.flatten(1).double()).square()
    return torch.from_numpy(scipy.optimize.linear_sum_assignment(cost.cpu().numpy())[1]).to(
        values.device
    )
