"""`mjp analyse`: from its arguments to the tables, pictures and files."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.drawing import MUTED, RULE, colour, drawn, picture
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_own, output_folder
from mjp_privacy.core.text import formula_free, shown
from mjp_privacy.data import ImageRecord, open_images, spread_subset
from mjp_privacy.data.images import keep_apart
from mjp_privacy.models.zoo import named_checkpoints
from mjp_privacy.paper.positions import (
    DIMENSIONS,
    REPEATS,
    Analysed,
    Matrix,
    Noise,
    PositionTable,
    Row,
    analysed,
    as_map,
    noise,
    position_table,
    projection,
)
from mjp_privacy.training.commands import AnalysisArguments, EvaluationArguments
from mjp_privacy.training.config import PUBLISHED
from mjp_privacy.training.evaluation import (
    Protocol,
    load_checkpoint,
    markdown_table,
    opened_batches,
    shown_number,
    with_interval,
    write_report,
)

# what the paper prints ----------------------------------------------------------------------------

GRID, WIDTH = 14, 384
PRINTED: Sequence[Mapping[str, Any]] = PUBLISHED["tables_6_and_8"]
"""A line for each of its models: `variance` is Table 6, percent in 3 to 7 dimensions, None where it
is not printed; mae_1d, std_1d, mae_2d and std_2d are Table 8's errors in patches with their ±."""

# what is printed and written ----------------------------------------------------------------------

COLUMNS: Mapping[str, tuple[str, int]] = {  # of a row: heading, decimals
    **{f"variance_{k}": (f"{k} dim. %" if k == DIMENSIONS[0] else f"{k}", 2) for k in DIMENSIONS},
    "dimensions_for_90": ("90 % in", 0),
    "mae_1d": ("1D MAE", 3),
    "mae_2d": ("2D MAE", 3),
    "start_share": ("start %", 1),
    "rest_variance_3": ("learned: 3 dim. %", 2),
    "rest_mae_2d": ("2D MAE", 3),
    "head_diversity": ("heads", 2),
    "image_diversity": ("images", 2),
}
RANGED = ("variance_3", "mae_2d")
"""Columns that show noise with its smallest and largest value over the seeds."""
COUNTS = ("grid", "width", "dimensions_for_90", "rest_dimensions_for_90", "images", "seed")
"""Columns of whole numbers."""

LEGEND = (
    "3 dim. %, 4 … 7: variance that PCA keeps (Table 6). 90 % in: singular values that hold 90 % "
    "of the energy (Fig. 4). MAE: a linear map from embedding to place, in patches: its number "
    "(1D) or row and column (2D), five folds, mean ± standard deviation over "
    f"{REPEATS} draws of the folds (Table 8).",
    "start %: variance along the random start, drawn again from the recipe in the file; learned: "
    "the table without it. Noise: tables drawn from N(0, 1) and never trained, mean [smallest, "
    "largest].",
    "heads, images: how much the last block's class-token attention differs between heads and "
    "between images, 0 (alike) to 1 (Jensen-Shannon divergence over its largest value; ours, the "
    "paper has no number).",
    "The paper's lines are of DeiT-S: 14×14 patches of width 384, 300 epochs of ImageNet. A figure "
    "of another grid, width or training stands beside them, not against them.",
    "Planes: PCA. Figures 1 and 7 show UMAP's, which depend on a seed and two settings that the "
    "paper does not print.",
)


def write_tables(results: Sequence[Analysed], noises: Sequence[Noise], out: Path) -> str:
    """Write analysis.md and analysis.csv into a folder, with a line for each model, each drawn
    table of noise and each model of the paper; what the command prints."""
    lines = [result.row for result in results]
    shown_lines = [_cells(result.label, result.row) for result in results]
    for tables in noises:
        numbers = pd.DataFrame([figures.numbers for figures in tables])
        about = {"kind": "noise", "label": "N(0, 1), not trained"}
        lines += [{**about, **f.numbers, "seed": seed} for seed, f in enumerate(tables)]
        mean = numbers.mean().drop(["mae_1d_std", "mae_2d_std"])
        size = "{grid}×{grid}×{width}".format(**tables[0].numbers)
        cells = _cells(f"noise {size}, {len(tables)} seeds", mean.to_dict())
        for place, (column, (_, decimals)) in enumerate(COLUMNS.items(), 1):
            if column in RANGED:
                ends = numbers[column].min(), numbers[column].max()
                cells[place] = with_interval(mean[column], *ends, f".{decimals}f")
        shown_lines.append(cells)
    for published in PRINTED:
        line: Row = {"kind": "paper", "label": published["model"], "grid": GRID, "width": WIDTH}
        for k, share in zip(DIMENSIONS, published["variance"] or (), strict=False):
            line[f"variance_{k}"] = share
        for name in ("1d", "2d"):
            line[f"mae_{name}"] = published[f"mae_{name}"]
            line[f"mae_{name}_std"] = published[f"std_{name}"]
        lines.append(line)
        shown_lines.append(_cells(f"paper: {published['model']}", line))
    table = pd.DataFrame(lines)
    table = table.astype({name: "Int64" for name in COUNTS if name in table})
    table["label"] = table["label"].map(formula_free)
    cells = markdown_table(["Model", *(head for head, _ in COLUMNS.values())], shown_lines)
    notes = [
        f"{result.label}: {note}"
        for result in results
        for note in result.model.card.checkpoint.notes
    ]
    parts = [
        "# What the position embeddings hold",
        "\n".join(cells),
        "\n".join(f"- {_escaped(words)}" for words in (*LEGEND, *notes)),
        "![tables](analysis.png)",
        *(
            f"![attention of {_escaped(result.label)}](attention_{number}.png)"
            for number, result in enumerate(results, 1)
        ),
    ]
    write_report(out, {"analysis.csv": table}, "analysis.md", "\n\n".join(parts) + "\n")
    return "\n".join(cells)


def _cells(name: str, line: Row) -> list[str]:
    cells = [_escaped(name)]
    for column, (_, decimals) in COLUMNS.items():
        number, around = shown_number(line.get(column), f".{decimals}f"), f"{column}_std"
        cells.append(f"{number}±{line[around]:.{decimals}f}" if around in line else number)
    return cells


def _escaped(text: object) -> str:
    """A stranger's word in Markdown: it is no element and no link."""
    return re.sub(r"([`\[\]])", r"\\\1", html.escape(str(text), quote=False))


# pictures -----------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 12
"""Tables with a row of their own; the curves show all."""
DIMENSIONS_DRAWN = 40
MOST_HEADS = 8
"""Heads whose attention is drawn; all enter the figures."""


def draw_analysis(results: Sequence[Analysed], noises: Sequence[Noise], path: Path) -> None:
    """Write the picture: the curves of Table 6 and Figure 4, and a row for each
    model with position embeddings: its patches along the first two principal directions,
    joined as neighbours are in the image (Fig. 1 and 7), along the first three, and the cosine
    similarities of every patch with all others (the poster's Fig. 1)."""
    tables = drawn_tables(results)
    with picture(path, 10, 3 + 2.9 * len(tables), dpi=80) as figure:
        parts = figure.subfigures(1 + len(tables), 1, squeeze=False)[:, 0]
        curves = parts[0].subplots(1, 2)
        _curves(curves[0], results, noises, "variance")
        curves[0].set_title("variance % (Table 6)")
        curves[0].legend(fontsize=6, loc="lower right")
        _curves(curves[1], results, noises, "energy")
        curves[1].set_title("energy % (Fig. 4)")
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
    for tables in noises:
        curves = 100 * np.stack([getattr(figures, name)[:DIMENSIONS_DRAWN] for figures in tables])
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


# attention ----------------------------------------------------------------------------------------


def draw_attention(result: Analysed, pixels: Tensor, path: Path) -> None:
    """Fig. 8, a row for each image (B, 3, S, S): the image, then the map of every head, each to its
    own largest value."""
    maps = result.maps[: len(pixels), :MOST_HEADS]
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


# the command --------------------------------------------------------------------------------------

PICTURES_DRAWN = 4
"""Photographs in a model's attention picture."""


def write_analysis(arguments: AnalysisArguments) -> Outcome:
    """Analyse the checkpoints, write all files and return what the command prints.

    write_analysis(AnalysisArguments(("cifar_vit", "cifar_vit_mjp"), Path("out"))).text
    """
    named = named_checkpoints(arguments.checkpoints, "mjp analyse")
    source = open_images(arguments.images)
    records = spread_subset(source.records, arguments.limit, arguments.seed)
    keep_apart(arguments.out, {"--images": arguments.images})
    check_own(arguments.out)
    size = None if arguments.img_size is None else f"{arguments.img_size}"
    told: Any = {"model": arguments.model, "mean": arguments.mean, "std": arguments.std}
    asked = EvaluationArguments(arguments.checkpoints, img_size=size, **told)
    models = [load_checkpoint(checkpoint, asked) for checkpoint in named]
    labels = [one.label for one in named]
    tables = [position_table(*pair) for pair in zip(models, labels, strict=True)]
    grids = [f"{label} {model.grid.rows}" for label, model in zip(labels, models, strict=True)]
    if len({model.grid.rows for model in models}) > 1:
        raise UserError(
            f"Position embeddings of different grids, by their side: {', '.join(grids)}. Expected "
            "one grid, for an error in patches and a share in 3 dimensions depend on it. Analyse "
            "them one by one, or resample all to one size with --img-size."
        )
    if not any(tables):
        raise UserError(
            f"{' and '.join(labels)}: no position embeddings, expected a model with a learned "
            "table whose rows differ. Name one, such as cifar_vit."
        )
    out = output_folder(arguments.out)
    results: list[Analysed] = []
    failed: dict[ImageRecord, str] = {}
    for checkpoint, model, table in zip(named, models, tables, strict=True):
        prepare = Protocol().preparation(model)
        read = [images for _, images in opened_batches(model, source, records, prepare, failed)]
        if not read:
            record, reason = next(iter(failed.items()))
            raise UserError(
                f"--images: none of {len(records)} images can be read: {shown(record.image_id)} is "
                f"{shown(reason)}. Give a folder or zip of photographs, or leave it out."
            )
        pixels = torch.cat(read)
        results.append(analysed(checkpoint, model, table, pixels, arguments.seed))
        path = out / f"attention_{len(results)}.png"
        draw_attention(results[-1], pixels[:PICTURES_DRAWN], path)
    sizes = dict.fromkeys((table.grid, table.width) for table in tables if table is not None)
    noises = [noise(*size) for size in sizes]
    draw_analysis(results, noises, out / "analysis.png")
    text = write_tables(results, noises, out)
    reasons = {record.image_id: reason for record, reason in failed.items()}
    return Outcome(f"{text}\n{out / 'analysis.md'}", reasons)
