"""`mjp analyse`: from its arguments to the tables, pictures and files."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.drawing import INK, MUTED, RULE, colour, drawn, picture
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_own, output_folder
from mjp_privacy.core.text import formula_free, shown
from mjp_privacy.data import ImageRecord, ImageSource, open_images, spread_subset
from mjp_privacy.data.images import keep_apart
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.zoo import NamedCheckpoint, named_checkpoints
from mjp_privacy.paper.commands import AnalysisArguments
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
from mjp_privacy.training.commands import EvaluationArguments
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

CAVEATS = (
    "The paper's lines are of DeiT-S: 14×14 patches of width 384, 300 epochs of ImageNet. A figure "
    "of another grid, width or training stands beside them, not against them.",
    "Table 6's row DeiT-S+MJP is no table of noise: one drawn from N(0, 1) at that size has about "
    "4 % of its variance in 3 dimensions, not 46.74 %. Under the recipe of Table 7 a start decays "
    "to e^-8.9 of itself (Σ of rate times decay); in a short training it stays.",
    "The paper gives no number for Figure 8's “more diverse and content-aware” attention; the two "
    "measures here are ours.",
)


# the figures as flat rows -------------------------------------------------------------------------


def rows(results: Sequence[Analysed], noises: Sequence[Noise]) -> list[Row]:
    """One for each model, each drawn table of noise, and each model of the paper."""
    lines = [result.row for result in results]
    for tables in noises:
        about = {"kind": "noise", "label": "N(0, 1), not trained"}
        lines += [{**about, **f.numbers, "seed": seed} for seed, f in enumerate(tables)]
    for published in PRINTED:
        line: Row = {"kind": "paper", "label": published["model"], "grid": GRID, "width": WIDTH}
        for k, share in zip(DIMENSIONS, published["variance"] or (), strict=False):
            line[f"variance_{k}"] = share
        for name in ("1d", "2d"):
            line[f"mae_{name}"] = published[f"mae_{name}"]
            line[f"mae_{name}_std"] = published[f"std_{name}"]
        lines.append(line)
    return lines


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
    "Planes: PCA. Figures 1 and 7 show UMAP's, which depend on a seed and two settings that the "
    "paper does not print.",
)


def write_tables(results: Sequence[Analysed], noises: Sequence[Noise], out: Path) -> str:
    """Write analysis.md and analysis.csv into a folder; what the command prints."""
    lines = rows(results, noises)
    table = pd.DataFrame(lines)
    table = table.astype({name: "Int64" for name in COUNTS if name in table})
    table["label"] = table["label"].map(formula_free)
    cells = markdown_table(["Model", *(head for head, _ in COLUMNS.values())], _cells(lines))
    notes = [
        f"{result.label}: {note}"
        for result in results
        for note in result.model.card.checkpoint.notes
    ]
    parts = [
        "# What the position embeddings hold",
        "\n".join(cells),
        "\n".join(f"- {_escaped(words)}" for words in (*LEGEND, *CAVEATS, *notes)),
        "![tables](analysis.png)",
        *(
            f"![attention of {_escaped(result.label)}](attention_{number}.png)"
            for number, result in enumerate(results, 1)
        ),
    ]
    markdown = "\n\n".join(parts) + "\n"
    write_report(out, {"analysis.csv": table}, "analysis.md", markdown)
    return "\n".join(cells)


def _cells(lines: Sequence[Row]) -> Iterator[list[str]]:
    """Models, noise of each size, the paper."""
    frame = pd.DataFrame(lines)
    frame = frame.reindex(columns=list(dict.fromkeys([*frame, *COLUMNS])))
    for (kind, grid, width), same in frame.groupby(
        ["kind", "grid", "width"], sort=False, dropna=False
    ):
        if kind == "noise":
            cells = []
            for column, (_, decimals) in COLUMNS.items():
                values, ends = same[column], (math.nan, math.nan)
                if column in RANGED:
                    ends = values.min(), values.max()
                cells.append(with_interval(values.mean(), *ends, f".{decimals}f"))
            yield [f"noise {grid:g}×{grid:g}×{width:g}, {len(same)} seeds", *cells]
            continue
        for line in same.to_dict("records"):
            name = f"paper: {line['label']}" if kind == "paper" else _escaped(line["label"])
            cells = []
            for column, (_, decimals) in COLUMNS.items():
                number = shown_number(line[column], f".{decimals}f")
                around = line.get(f"{column}_std")
                cells.append(number if pd.isna(around) else f"{number}±{around:.{decimals}f}")
            yield [name, *cells]


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
    """Write the picture: the curves of Table 6 and Figure 4, the errors of Table 8, and a row for
    each model with position embeddings: its patches along the first two principal directions,
    joined as neighbours are in the image (Fig. 1 and 7), along the first three, and the cosine
    similarities of every patch with all others (the poster's Fig. 1)."""
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


def _errors(axes: Axes, results: Sequence[Analysed], noises: Sequence[Noise]) -> None:
    """Bars of the 2D errors (Table 8), beside the error of noise and of a constant."""
    bars: list[tuple[str, float, float, str]] = []
    for number, result in enumerate(results):
        if result.figures is not None:
            found, constant = result.figures.numbers, result.figures.numbers["constant_2d"]
            bars.append((drawn(result.label), found["mae_2d"], found["mae_2d_std"], colour(number)))
    for tables in noises:
        errors = [figures.numbers["mae_2d"] for figures in tables]
        grid, width = tables[0].table.grid, tables[0].table.width
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
    loaded = _loaded(named, arguments)
    out = output_folder(arguments.out)
    results: list[Analysed] = []
    failed: dict[ImageRecord, str] = {}
    for checkpoint, (model, table) in zip(named, loaded, strict=True):
        pixels = _pixels(model, source, records, failed)
        results.append(analysed(checkpoint, model, table, pixels, arguments.seed))
        path = out / f"attention_{len(results)}.png"
        draw_attention(results[-1], pixels[:PICTURES_DRAWN], path)
    sizes = dict.fromkeys((table.grid, table.width) for _, table in loaded if table is not None)
    noises = [noise(*size) for size in sizes]
    draw_analysis(results, noises, out / "analysis.png")
    text = write_tables(results, noises, out)
    reasons = {record.image_id: reason for record, reason in failed.items()}
    return Outcome(f"{text}\n{out / 'analysis.md'}", reasons)


Loaded = tuple[LoadedModel, PositionTable | None]


def _loaded(named: Sequence[NamedCheckpoint], arguments: AnalysisArguments) -> list[Loaded]:
    """The models with their tables; UserError unless the grids are one and some table is there."""
    loaded: list[Loaded] = []
    for checkpoint in named:
        size = None if arguments.img_size is None else f"{arguments.img_size}"
        told: Any = {"model": arguments.model, "mean": arguments.mean, "std": arguments.std}
        asked = EvaluationArguments((checkpoint.source,), img_size=size, **told)
        model = load_checkpoint(checkpoint, asked)
        loaded.append((model, position_table(model, checkpoint.label)))
    labels, grids = [one.label for one in named], [model.grid.rows for model, _ in loaded]
    if len(set(grids)) > 1:
        sizes = zip(labels, grids, strict=True)
        listed = ", ".join(f"{label} {grid}×{grid}" for label, grid in sizes)
        raise UserError(
            f"Position embeddings of different grids: {listed}. Expected one grid, for an error in "
            "patches and a share in 3 dimensions depend on it. Analyse them one by one, or "
            "resample all to one size with --img-size."
        )
    if all(table is None for _, table in loaded):
        raise UserError(
            f"{' and '.join(labels)}: no position embeddings, expected a model with a learned "
            "table whose rows differ. Name one, such as cifar_vit."
        )
    return loaded


def _pixels(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    failed: dict[ImageRecord, str],
) -> Tensor:
    """The readable images as the model will see them, before normalisation (B, 3, S, S); `failed`
    gains the reasons of the others."""
    prepare = Protocol().preparation(model)
    pictures = [images for _, images in opened_batches(model, source, records, prepare, failed)]
    if not pictures:
        record, reason = next(iter(failed.items()))
        raise UserError(
            f"--images: none of {len(records)} images can be read: {shown(record.image_id)} is "
            f"{shown(reason)}. Give a folder or zip of photographs, or leave it out."
        )
    return torch.cat(pictures)
