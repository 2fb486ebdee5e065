"""Position embeddings laid out in a plane by UMAP, as in the paper's Figures 1 and 7.

UMAP keeps near neighbours near and little else: distances and shapes in its plane depend on its
seed and settings, which the paper does not print. So every table is laid out from two seeds, with
the settings of the library.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mjp_privacy.analysis.position_table import Matrix, PositionTable
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.training.drawing import plain_texts

NEIGHBOURS = 15
"""Nearest patches that a patch is tied to: the library's own setting."""
APART = 0.1
"""Least distance of two patches in the plane: the library's own setting."""
SEEDS = (0, 1)


def umap_library() -> Any:
    """The module `umap`; UserError with what to install where there is none."""
    try:
        return importlib.import_module("umap")
    except ImportError as error:
        raise UserError(
            "--umap: expected the package umap-learn, which is not installed. Run "
            "`pip install .[umap]`, or leave out --umap: analysis.png has PCA's plane."
        ) from error


def umap_plane(table: PositionTable, seed: int) -> Matrix:
    """The patches (N, 2) in the plane; the same for the same table and seed."""
    neighbours = min(NEIGHBOURS, len(table.rows) - 1)
    with warnings.catch_warnings():  # it says that a seed costs it its threads
        warnings.simplefilter("ignore")
        plane: Matrix = (
            umap_library()
            .UMAP(n_neighbors=neighbours, min_dist=APART, random_state=seed, n_jobs=1)
            .fit_transform(table.rows)
        )
    return plane


@plain_texts()
def draw_umap(tables: Sequence[tuple[str, PositionTable]], path: Path) -> None:
    """A row for each named table, a column for each seed: neighbours in the image are joined."""
    from matplotlib.figure import Figure

    from mjp_privacy.analysis.picture import draw_joined

    size = 3.2
    figure = Figure(figsize=(size * len(SEEDS), size * len(tables)), layout="constrained")
    panels = figure.subplots(len(tables), len(SEEDS), squeeze=False)
    for line, (title, table) in zip(panels, tables, strict=True):
        for panel, seed in zip(line, SEEDS, strict=True):
            draw_joined(panel, umap_plane(table, seed).reshape(table.grid, table.grid, 2))
            panel.set_title(f"{title}, seed {seed}", fontsize=8, loc="left")
            panel.set_xticks([])
            panel.set_yticks([])
    write_atomically(path, lambda place: figure.savefig(place, dpi=80, format="png"))
