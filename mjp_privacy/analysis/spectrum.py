"""How many directions a table of position embeddings takes: the paper's Table 6, Figures 1 and 4.

The formula of the paper's Definition 1 is lost in the text at hand; it speaks of singular values σ
and of PCA. Here, as in every library's PCA, rows are centred and a direction counts by σ². Figure 4
is of an SVD of the table itself, so rows are not centred there. On a ViT-Ti the two differ by less
than a percentage point; shares of σ instead of σ² would be far lower (35 for 46 % at three).
"""

from __future__ import annotations

import numpy as np

from mjp_privacy.analysis.position_table import Matrix, PositionTable

DIMENSIONS = (3, 4, 5, 6, 7)
"""Columns of the paper's Table 6."""


def explained_variance(table: PositionTable) -> Matrix:
    """Entry k-1 is the share of the variance that k dimensions of PCA hold, up to 1 (Table 6)."""
    return _cumulative(table.centred())


def energy(table: PositionTable) -> Matrix:
    """Entry k-1 is the share of the energy Σσ² in the k largest singular values (Fig. 4)."""
    return _cumulative(table.rows)


def at(curve: Matrix, dimensions: int) -> float:
    """The share that a curve reaches at so many dimensions: at(explained_variance(table), 3)."""
    return float(curve[min(dimensions, len(curve)) - 1])


def dimensions_for(curve: Matrix, share: float) -> int:
    """The fewest dimensions that hold this share."""
    return int(np.searchsorted(curve, share - 1e-12)) + 1


def projection(table: PositionTable, dimensions: int = 3) -> Matrix:
    """The patches (N, dimensions) along the first principal directions (Fig. 1 b).

    The sign of a direction is arbitrary: its largest coordinate is made positive.
    """
    left, sizes, _ = np.linalg.svd(table.centred(), full_matrices=False)
    coordinates: Matrix = left[:, :dimensions] * sizes[:dimensions]
    largest = np.abs(coordinates).argmax(axis=0)
    signs = np.sign(coordinates[largest, np.arange(coordinates.shape[1])])
    signed: Matrix = coordinates * np.where(signs == 0, 1, signs)
    return signed


def _cumulative(rows: Matrix) -> Matrix:
    """The shares of Σσ² that the largest singular values of a matrix hold."""
    squares = np.linalg.svd(rows, compute_uv=False) ** 2
    shares: Matrix = np.cumsum(squares) / np.sum(squares)
    return shares
