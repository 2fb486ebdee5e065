"""The position embeddings of a model's patches as a matrix, and tables of pure noise beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.models import MJPVisionTransformer

Matrix = NDArray[np.float64]

LEAST_GRID = 3
"""Patches along a side: five folds need five patches, and Table 6 three directions."""


@dataclass(frozen=True)
class PositionTable:
    """rows[i] (D,) is the embedding of patch i, counted row by row; grid² of them.

    The class token's row and the unknown embedding are left out, as in the authors' script
    (`pestudy/absolute.py` takes the rows 1 to 196).
    """

    grid: int
    rows: Matrix

    @property
    def width(self) -> int:
        """Numbers in an embedding, D."""
        return int(self.rows.shape[1])

    def centred(self) -> Matrix:
        """The rows minus their mean."""
        centred: Matrix = self.rows - self.rows.mean(axis=0)
        return centred

    def places(self) -> Matrix:
        """(N, 3): a patch's number in the sequence, its row and its column, all from 0."""
        number = np.arange(self.grid**2)
        return np.stack([number, number // self.grid, number % self.grid], axis=1).astype(float)


def position_table(model: MJPVisionTransformer, label: str) -> PositionTable | None:
    """The model's table in float64; None of a model without position embeddings.

    A model whose rows are all equal has none either: it tells no two places apart.
    label: the model's name, for messages
    """
    if model.family != "vit":
        raise UserError(
            f"{label} is a {model.family}: expected a plain ViT, which has one embedding for each "
            "patch and a class token that looks at all of them. Leave it out."
        )
    if model.grid < LEAST_GRID:
        raise UserError(
            f"{label}: expected a grid of at least {LEAST_GRID}×{LEAST_GRID} patches, got "
            f"{model.grid}×{model.grid}, too few to tell what positions hold. Give a larger "
            "--img-size."
        )
    if model.position_embedding != "learned" or model.pos_embed is None:
        return None
    table = PositionTable(model.grid, model.table.detach()[0, 1:].double().cpu().numpy())
    return table if (table.rows != table.rows[0]).any() else None


def noise_table(grid: int, width: int, seed: int) -> PositionTable:
    """A table drawn from N(0, 1), as the paper's code starts MJP's; never trained."""
    generator = np.random.default_rng(derive_seed("noise table", grid, width, seed))
    return PositionTable(grid, generator.standard_normal((grid**2, width)))
