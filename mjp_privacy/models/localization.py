"""Dense absolute localization (DAL): position embeddings regressed onto their grid positions.

    L_DAL = mean over visible patches and both coordinates of |(row, column) - g(E_pos)|

The target is the raw grid index, as the authors train it; `normalize` divides it by the grid side.
"""

from __future__ import annotations

import random
from typing import Literal

import torch
from torch import Tensor, nn

DalKind = Literal["none", "pca", "linear", "nonlinear"]
PCA_ITERATIONS = 5


def grid_positions(
    grid: int, *, normalize: bool = False, device: torch.device | None = None
) -> Tensor:
    """(N, 2) row and column of every patch, made on `device` so that nothing has to be copied."""
    index = torch.arange(grid * grid, device=device)
    positions = torch.stack((index // grid, index % grid), dim=-1).double()
    return positions / grid if normalize else positions


class LocalizationRegressor(nn.Module):
    """g of the paper: position embedding (..., N, D) -> position (..., N, 2).

    linear     one layer
    nonlinear  D -> D -> 2 with a ReLU, the authors' MLP
    pca        no parameters: projection onto the two leading principal directions of the visible
               embeddings, found by five steps of subspace iteration from a fixed start (the
               authors' start is random, so theirs is not reproducible)
    """

    def __init__(self, dim: int, kind: DalKind) -> None:
        super().__init__()
        self.kind = kind
        self.layers: nn.Module
        if kind == "nonlinear":
            self.layers = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 2))
        elif kind == "linear":
            self.layers = nn.Linear(dim, 2)
        else:
            self.layers = nn.Identity()

    def forward(self, embeddings: Tensor, visible: Tensor) -> Tensor:
        """Positions of all rows; `visible` (..., N) says which rows the PCA is computed from.

        The other kinds treat each row by itself and do not read `visible`.
        """
        if self.kind == "pca":
            return embeddings @ principal_directions(embeddings, visible)
        return self.layers(embeddings)


def principal_directions(embeddings: Tensor, visible: Tensor) -> Tensor:
    """(..., D, 2) leading principal directions of the visible rows; differentiable.

    Their signs are fixed: the entry of largest magnitude is positive. With fewer than three visible
    rows the directions are zero: such rows span no plane, and the decompositions would have an
    infinite derivative.
    """
    weights = visible.to(embeddings.dtype).unsqueeze(-1)
    number = weights.sum(-2, keepdim=True)
    mean = (embeddings * weights).sum(-2, keepdim=True) / number.clamp(min=1)
    centred = torch.where(number > 2, (embeddings - mean) * weights, 0.0)
    start = _fixed_start(embeddings.shape[-1]).to(embeddings)
    basis = torch.linalg.qr(centred.mT @ (centred @ start)).Q
    for _ in range(PCA_ITERATIONS):
        basis = torch.linalg.qr(centred.mT @ (centred @ basis)).Q
    projected = centred @ basis
    rotation = torch.linalg.eigh(projected.mT @ projected).eigenvectors.flip(-1)
    directions = basis @ rotation
    largest = directions.gather(-2, directions.abs().argmax(-2, keepdim=True))
    return torch.where(number > 2, directions * largest.sign(), 0.0)


def _fixed_start(dim: int) -> Tensor:
    """(dim, 2) Gaussian numbers, always the same.

    They come from Python's generator, because under vmap torch draws new ones for every sample.
    """
    rng = random.Random(0)
    return torch.tensor([[rng.gauss(0, 1), rng.gauss(0, 1)] for _ in range(dim)])


def masked_l1(target: Tensor, prediction: Tensor, visible: Tensor) -> Tensor:
    """Mean |target - prediction| over visible rows and both coordinates; 0 if no row is visible."""
    weights = visible.to(prediction.dtype).unsqueeze(-1)
    error = (target.to(prediction) - prediction).abs() * weights
    return error.sum((-2, -1)) / (2 * weights.sum((-2, -1))).clamp(min=1)
