"""How alike the embeddings of two places are: the similarity maps of the paper's poster."""

from __future__ import annotations

import numpy as np

from mjp_privacy.analysis.position_table import Matrix, PositionTable


def similarity(table: PositionTable) -> Matrix:
    """(N, N) cosine similarities of the rows as they are; a row of zeros is like no other."""
    lengths = np.linalg.norm(table.rows, axis=1, keepdims=True)
    directions = table.rows / np.where(lengths == 0, 1, lengths)
    cosines: Matrix = directions @ directions.T
    return cosines


def as_map(table: PositionTable) -> Matrix:
    """(G², G²): the tile in row r and column c is the map of patch (r, c)'s similarities."""
    grid = table.grid
    tiles = similarity(table).reshape(grid, grid, grid, grid)
    picture: Matrix = tiles.transpose(0, 2, 1, 3).reshape(grid * grid, grid * grid)
    return picture


def neighbours_and_others(table: PositionTable) -> tuple[float, float]:
    """The mean similarity of patches that share a side, and of all other pairs."""
    cosines, places = similarity(table), table.places()[:, 1:]
    steps = np.abs(places[:, None] - places[None]).sum(axis=-1)
    return float(cosines[steps == 1].mean()), float(cosines[steps > 1].mean())
