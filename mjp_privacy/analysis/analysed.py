"""All figures of one model, and of noise in the size of its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mjp_privacy.analysis.attention import LastAttention, last_attention
from mjp_privacy.analysis.position_table import (
    Matrix,
    PositionTable,
    noise_table,
    position_table,
)
from mjp_privacy.analysis.regression import REPEATS, PlaceError, place_error
from mjp_privacy.analysis.similarity import neighbours_and_others
from mjp_privacy.analysis.spectrum import energy, explained_variance
from mjp_privacy.analysis.start import Start, start_in
from mjp_privacy.models import LoadedModel

SEEDS = 10
"""Tables of noise."""


@dataclass(frozen=True)
class Figures:
    """What a table holds.

    variance    cumulative shares by PCA (Table 6); energy: the same of its SVD (Fig. 4)
    places      errors of a linear map to the patches' places (Table 8)
    neighbours  cosine similarity of patches that share a side; others: of all other pairs
    """

    variance: Matrix
    energy: Matrix
    places: PlaceError
    neighbours: float
    others: float


@dataclass(frozen=True)
class Analysed:
    """One model: its table and that one's figures, None without position embeddings.

    start       how much of it is the noise it began as, where the file tells
    rest        figures of what was learned beside that start
    attention   of the last block, on `images` images
    """

    label: str
    architecture: str
    trained_gamma: float | None
    table: PositionTable | None
    figures: Figures | None
    start: Start | None
    rest: Figures | None
    attention: LastAttention
    images: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Noise:
    """Figures of SEEDS tables from N(0, 1), none of them trained."""

    grid: int
    width: int
    tables: tuple[Figures, ...]


def figures_of(table: PositionTable, *, seed: int = 0, repeats: int = REPEATS) -> Figures:
    """All figures of one table; seed, repeats: of the draws of the regression's folds."""
    return Figures(
        explained_variance(table),
        energy(table),
        place_error(table, seed=seed, repeats=repeats),
        *neighbours_and_others(table),
    )


def analysed(
    label: str,
    model: LoadedModel,
    metadata: Mapping[str, str],
    pixels: Tensor,
    *,
    seed: int = 0,
) -> Analysed:
    """Analyse a loaded model; metadata: its file's, pixels (B, 3, S, S) in [0, 1]."""
    table = position_table(model, label)
    start = None if table is None else start_in(model, table, metadata)
    with torch.no_grad():
        attention = last_attention(model, model.normalize(pixels))
    return Analysed(
        label,
        model.card.architecture,
        model.card.trained_gamma,
        table,
        None if table is None else figures_of(table, seed=seed),
        start,
        None if start is None else figures_of(start.rest, seed=seed),
        attention,
        len(pixels),
        model.card.checkpoint.notes,
    )


def noise(grid: int, width: int, seeds: int = SEEDS) -> Noise:
    """Figures of tables that were drawn and never trained, one for each seed.

    Each has one draw of the folds: what differs between tables is more than that.
    """
    drawn = enumerate(noise_table(grid, width, seed) for seed in range(seeds))
    return Noise(
        grid, width, tuple(figures_of(table, seed=seed, repeats=1) for seed, table in drawn)
    )
