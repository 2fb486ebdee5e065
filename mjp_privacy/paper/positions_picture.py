"""Pictures of position embeddings and of where the last block looks, of several models.

`draw_analysis`: the curves at the top are Table 6 and Figure 4. Below is a row for each model: its
patches along the first two principal directions, joined as neighbours are in the image (Fig. 1 and
7), along the first three, and the cosine similarities of every patch with all others (the poster's
Fig. 1). `draw_umap` lays the plane out as the paper does; `draw_attention` is its Fig. 8.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from mjp_privacy.core.drawing import INK, MUTED, RULE, colour, drawn, picture
from mjp_privacy.core.errors import UserError
from mjp_privacy.paper.positions import (
    Analysed,
    Matrix,
    Noise,
    PositionTable,
    as_map,
    projection,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 12
"""Tables with a row of their own; the curves show all."""
DIMENSIONS_DRAWN = 40
MOST_HEADS = 8
"""Heads whose attention is drawn; all enter the figures."""
NEIGHBOURS = 15
"""Nearest patches that a patch is tied to: UMAP's own setting."""
APART = 0.1
"""Least distance of two patches in UMAP's plane: its own setting."""
SEEDS = (0, 1)


def draw_analysis(results: Sequence[Analysed], noises: Sequence[Noise], path: Path) -> None:
    """Write the picture; models without position embeddings are left out."""
    tables = drawn_tables(results)
    with picture(path, 10, 3 + 2.9 * len(tables), dpi=80) as figure:
        parts = figure.subfigures(1 + len(tables), 1, squeeze=False)[:, 0]
        curves = parts[0].subplots(1, 3)
        _curves(curves[0], results, noises, "variance")
        curves[0].set_title("variance % (Table 6)")
        curves[0].legend(fontsize=6, loc="lower right")
        _curves(curves[1], results, noises, "energy")
        curves[1].set_title("energy % (Fig. 4)")
        _errors(curves[2], results, noises)
        for part, (title, table) in zip(parts[1:], tables, strict=True):
            plane = part.add_subplot(1, 3, 1)
            draw_joined(plane, projection(table, 2).reshape(table.grid, table.grid, 2))
            plane.set_xlabel("2 principal directions", fontsize=8)
            plane.set_title(title, fontweight="bold", loc="left")
            space: Any = part.add_subplot(1, 3, 2, projection="3d")
            draw_joined(space, projection(table, 3).reshape(table.grid, table.grid, 3))
            space.set_title("3 principal directions", fontsize=8)
            space.set_in_layout(False)  # its bounds, with the cube's edges outside, leave no room
            space.set(xticklabels=[], yticklabels=[], zticklabels=[])
            alike = part.add_subplot(1, 3, 3)
            look: Any = {"vmin": -1, "vmax": 1, "cmap": "RdBu_r", "interpolation": "nearest"}
            drawing = alike.imshow(as_map(table), **look)
            for edge in range(1, table.grid):
                for line in (alike.axhline, alike.axvline):
                    line(edge * table.grid - 0.5, color="white", linewidth=0.5)
            alike.set_title("cosine similarity, a tile a patch", fontsize=8)
            alike.set_axis_off()
            part.colorbar(drawing, ax=alike, shrink=0.8).ax.tick_params(labelsize=6)


def drawn_tables(results: Sequence[Analysed]) -> list[tuple[str, PositionTable]]:
    """The tables to draw, at most MOST_ROWS, with their titles; of one that is mostly its start,
    also what else it has."""
    tables: list[tuple[str, PositionTable]] = []
    for result in results:
        if result.figures is not None:
            tables.append((drawn(result.label), result.figures.table))
        if result.learned is not None:
            tables.append((f"{drawn(result.label)}, without its start", result.learned.table))
    return tables[:MOST_ROWS]


def _curves(axes: Axes, results: Sequence[Analysed], noises: Sequence[Noise], name: str) -> None:
    """One curve a model over the number of dimensions; a dotted one of what was learned beside the
    start; a band of noise."""
    for noise in noises:
        curves = 100 * np.stack([getattr(figures, name)[:DIMENSIONS_DRAWN] for figures in noise])
        dimensions = np.arange(1, curves.shape[1] + 1)
        low, high = curves.min(axis=0), curves.max(axis=0)
        axes.fill_between(dimensions, low, high, color=MUTED, alpha=0.5, label="noise")
    for number, result in enumerate(results):
        shade = colour(number)
        for figures, style in ((result.figures, "-"), (result.learned, ":")):
            if figures is not None:
                curve = 100 * getattr(figures, name)[:DIMENSIONS_DRAWN]
                label = drawn(result.label) if style == "-" else None
                dimensions = np.arange(1, len(curve) + 1)
                axes.plot(dimensions, curve, style, color=shade, label=label, linewidth=1.4)
    axes.set_xlabel("dimensions   (dotted: learned beside its start)", fontsize=8)
    axes.set_ylim(0, 102)
    axes.tick_params(labelsize=7)


def _errors(axes: Axes, results: Sequence[Analysed], noises: Sequence[Noise]) -> None:
    """Bars of the 2D errors (Table 8), beside the error of noise and of a constant."""
    bars: list[tuple[str, float, float, str]] = []
    for number, result in enumerate(results):
        if result.figures is not None:
            found, constant = result.figures.numbers, result.figures.numbers["constant_2d"]
            bars.append((drawn(result.label), found["mae_2d"], found["mae_2d_std"], colour(number)))
    for noise in noises:
        errors = [figures.numbers["mae_2d"] for figures in noise]
        grid, width = noise[0].table.grid, noise[0].table.width
        name = f"noise {grid}×{grid}×{width}"
        bars.append((name, float(np.mean(errors)), float(np.std(errors)), MUTED))
    names, values, around, colours = zip(*bars, strict=True)
    axes.barh(range(len(bars)), values, xerr=around, color=colours, height=0.7)
    axes.set_yticks(range(len(bars)), names, fontsize=6)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.axvline(constant, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xlabel("patches   (dashed: a constant guess)", fontsize=8)
    axes.set_title("2D error of a linear map (Table 8)")
    axes.tick_params(labelsize=7)


def draw_joined(axes: Any, points: Matrix) -> None:
    """Points of a grid (G, G, 2 or 3): neighbours joined by lines; a hue a place, red grows
    downwards and blue to the right."""
    if points.shape[-1] == 2:
        axes.set(xticks=[], yticks=[], frame_on=False)
    for line in (*points, *points.transpose(1, 0, 2)):
        axes.plot(*line.T, color=RULE, linewidth=0.6, zorder=1)
    grid, scale = len(points), max(len(points) - 1, 1)
    row, column = np.divmod(np.arange(grid**2), grid)
    hues = np.stack([row / scale, np.full(grid**2, 0.35), column / scale], axis=1)
    axes.scatter(*points.reshape(grid**2, -1).T, c=hues, s=14, zorder=2)


# UMAP ---------------------------------------------------------------------------------------------


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
        settings = {"n_neighbors": neighbours, "min_dist": APART, "random_state": seed}
        plane: Matrix = umap_library().UMAP(**settings, n_jobs=1).fit_transform(table.rows)
    return plane


def draw_umap(tables: Sequence[tuple[str, PositionTable]], path: Path) -> None:
    """A row for each named table, a column for each of two seeds.

    UMAP keeps near neighbours near and little else: distances and shapes in its plane depend on
    its seed and settings, which the paper does not print. The settings are the library's.
    """
    size = 3.2
    with picture(path, size * len(SEEDS), size * len(tables), dpi=80) as figure:
        panels = figure.subplots(len(tables), len(SEEDS), squeeze=False)
        for line, (title, table) in zip(panels, tables, strict=True):
            for panel, seed in zip(line, SEEDS, strict=True):
                draw_joined(panel, umap_plane(table, seed).reshape(table.grid, table.grid, 2))
                panel.set_title(f"{title}, seed {seed}", fontsize=8, loc="left")


# attention ----------------------------------------------------------------------------------------


def draw_attention(result: Analysed, pixels: Tensor, path: Path) -> None:
    """A row for each image (B, 3, S, S): the image, then the map of every head, each to its own
    largest value."""
    maps = result.attention.maps[: len(pixels), :MOST_HEADS]
    rows, heads = maps.shape[:2]
    with picture(path, 1.5 * (heads + 1), 1.5 * rows + 0.5, dpi=100) as figure:
        panels = figure.subplots(rows, heads + 1, squeeze=False)
        for row in range(rows):
            panels[row, 0].imshow(pixels[row].permute(1, 2, 0).numpy(), interpolation="nearest")
            for head in range(heads):
                panels[row, head + 1].imshow(maps[row, head], interpolation="nearest")
                if row == 0:
                    panels[row, head + 1].set_title(f"head {head + 1}", fontsize=7)
            for panel in panels[row]:
                panel.set_axis_off()
        figure.suptitle(f"{drawn(result.label)}: [CLS] of the last block", fontsize=9)
