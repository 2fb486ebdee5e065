"""`mjp analyse`: from its arguments to the tables and files."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically, write_json
from mjp_privacy.core.text import formula_free, shown
from mjp_privacy.data import (
    ImageError,
    ImageRecord,
    ImageSource,
    Preprocessing,
    open_images,
    spread_subset,
)
from mjp_privacy.data.opening import keep_apart
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.zoo import (
    NamedCheckpoint,
    for_all_channels,
    keep_earlier,
    named_checkpoints,
)
from mjp_privacy.paper.arguments import AnalysisArguments
from mjp_privacy.paper.positions import (
    DIMENSIONS,
    MOSTLY,
    REPEATS,
    Analysed,
    Figures,
    Noise,
    analysed,
    at,
    dimensions_for,
    noise,
    position_table,
)
from mjp_privacy.paper.positions_picture import (
    draw_analysis,
    draw_attention,
    draw_umap,
    drawn_tables,
    umap_library,
)
from mjp_privacy.training.published import PUBLISHED

# what the paper prints ----------------------------------------------------------------------------

GRID, WIDTH = 14, 384


@dataclass(frozen=True)
class PublishedTable:
    """One model of the paper. None: not printed.

    variance      Table 6, percent of the variance in 3, 4, 5, 6 and 7 dimensions
    mae_1d, ...   Table 8, mean absolute errors in patches with their ±
    """

    model: str
    variance: Sequence[float] | None
    mae_1d: float
    std_1d: float
    mae_2d: float
    std_2d: float


PRINTED = tuple(PublishedTable(**row) for row in PUBLISHED["tables_6_and_8"])

CAVEATS = (
    "The paper's lines are of DeiT-S: 14×14 patches of width 384, 300 epochs of ImageNet. A figure "
    "of another grid, width or training stands beside them, not against them.",
    "Table 6's row DeiT-S+MJP is no table of noise: one drawn from N(0, 1) at that size has about "
    "4 % of its variance in 3 dimensions, not 46.74 %. Under the recipe of Table 7 a start decays "
    "to e^-8.9 of itself (Σ of rate times decay); in a short training it stays.",
    "The paper gives no number for Figure 8's “more diverse and content-aware” attention; the two "
    "measures here are ours.",
)


# the answer in words: a sentence a model ----------------------------------------------------------

READ = 0.5
"""Of the error of a constant guess: below it the patches' places count as read."""


def sentences(results: Sequence[Analysed], noises: Sequence[Noise]) -> list[str]:
    """One for each model, in their order."""
    by_size = {(noise.grid, noise.width): noise for noise in noises}
    return [_sentence(result, by_size) for result in results]


def _sentence(result: Analysed, noises: dict[tuple[int, int], Noise]) -> str:
    table, figures = result.table, result.figures
    if table is None or figures is None:
        return f"{result.label}: has no position embeddings, so nothing tells a place."
    noise = noises[table.grid, table.width]
    low, high = spread(noise)
    parts = [
        f"{result.label}: {_verdict(result, figures)}. 3 dimensions hold "
        f"{100 * at(figures.variance, 3):.1f} % of the variance (noise {low:.1f} to {high:.1f}), a "
        f"linear map misses a patch by {figures.places.mae_2d:.2f} (a constant by "
        f"{figures.places.constant_2d:.2f})"
    ]
    if result.start is not None and result.rest is not None and result.start.share >= MOSTLY:
        parts.append(
            f"{100 * result.start.share:.1f} % of the variance is still that of its start, N(0, "
            f"{result.start.std:.1g}²); of what was learned beside it 3 dimensions hold "
            f"{100 * at(result.rest.variance, 3):.1f} %"
        )
    return "; ".join(parts) + "."


def _verdict(result: Analysed, figures: Figures) -> str:
    if result.start is not None and result.start.share >= MOSTLY:
        return "mostly the noise it started from"
    if figures.places.mae_2d <= READ * figures.places.constant_2d:
        return "the patches' places can be read from it"
    return "a linear map reads little of the patches' places"


def spread(noise: Noise, dimensions: int = 3) -> tuple[float, float]:
    """The smallest and the largest share of the variance over the seeds, in percent."""
    shares = [100 * at(figures.variance, dimensions) for figures in noise.tables]
    return min(shares), max(shares)


# the figures as flat rows -------------------------------------------------------------------------

Row = dict[str, str | int | float | None]

MOST_ENERGY = 0.9
NOISE, PAPER = "noise", "paper"
"""What a row is of, in the column `kind`; else it is a `model`."""


def rows(results: Sequence[Analysed], noises: Sequence[Noise]) -> Iterator[Row]:
    """One for each model, each drawn table of noise, and each model of the paper.

    Shares are in percent, errors in patches.
    """
    for result in results:
        yield _of_model(result)
    for drawn in noises:
        for seed, figures in enumerate(drawn.tables):
            size: Row = {"grid": drawn.grid, "width": drawn.width, "seed": seed}
            yield {"kind": NOISE, "label": "N(0, 1), not trained", **size, **_of_table(figures)}
    for published in PRINTED:
        yield _of_paper(published)


def _of_model(result: Analysed) -> Row:
    row: Row = {
        "kind": "model",
        "label": result.label,
        "architecture": result.architecture,
        "trained_gamma": result.trained_gamma,
    }
    if result.table is not None and result.figures is not None:
        row |= {"grid": result.table.grid, "width": result.table.width}
        row |= _of_table(result.figures)
    if result.start is not None and result.rest is not None:
        start = result.start
        row |= {"start_std": start.std, "start_left": start.left, "start_share": 100 * start.share}
        learned = _of_table(result.rest).items()
        row |= {f"rest_{name}": value for name, value in learned if "constant" not in name}
    looked = result.attention
    row |= {"head_diversity": looked.head_diversity, "image_diversity": looked.image_diversity}
    return row | {"attention_spread": looked.spread, "images": result.images}


def _of_table(figures: Figures) -> Row:
    places = figures.places
    row: Row = {f"variance_{k}": 100 * at(figures.variance, k) for k in DIMENSIONS}
    row |= {f"energy_{k}": 100 * at(figures.energy, k) for k in DIMENSIONS}
    row |= {"dimensions_for_90": dimensions_for(figures.energy, MOST_ENERGY)}
    row |= {"mae_1d": places.mae_1d, "mae_1d_std": places.std_1d}
    row |= {"mae_2d": places.mae_2d, "mae_2d_std": places.std_2d}
    row |= {"constant_1d": places.constant_1d, "constant_2d": places.constant_2d}
    return row | {"neighbour_similarity": figures.neighbours, "other_similarity": figures.others}


def _of_paper(published: PublishedTable) -> Row:
    row: Row = {"kind": PAPER, "label": published.model, "grid": GRID, "width": WIDTH}
    if published.variance is not None:
        shares = zip(DIMENSIONS, published.variance, strict=True)
        row |= {f"variance_{k}": share for k, share in shares}
    row |= {"mae_1d": published.mae_1d, "mae_1d_std": published.std_1d}
    return row | {"mae_2d": published.mae_2d, "mae_2d_std": published.std_2d}


# what is printed and written ----------------------------------------------------------------------

DASH = "–"
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
    "Planes: PCA. UMAP's, which Figures 1 and 7 show, depends on a seed and two settings that the "
    "paper does not print (--umap draws it from two seeds); the regression measures what such a "
    "picture suggests.",
)


def console(results: Sequence[Analysed], noises: Sequence[Noise]) -> str:
    """The answer in sentences, then the table."""
    return "\n".join([*sentences(results, noises), "", *_table(list(rows(results, noises)))])


def write_tables(
    results: Sequence[Analysed], noises: Sequence[Noise], out: Path, *, has_umap: bool = False
) -> None:
    """analysis.md, analysis.csv and analysis.json into a folder."""
    lines = list(rows(results, noises))
    markdown = _markdown(results, noises, lines, has_umap)
    table = _csv(lines)
    write_atomically(out / "analysis.csv", lambda place: place.write_text(table, "utf-8"))
    write_json(out / "analysis.json", _json(results, lines))
    write_atomically(out / "analysis.md", lambda place: place.write_text(markdown, "utf-8"))


def _markdown(
    results: Sequence[Analysed], noises: Sequence[Noise], lines: Sequence[Row], has_umap: bool
) -> str:
    notes = [f"{result.label}: {note}" for result in results for note in result.notes]
    attention = [
        f"![attention of {_escaped(result.label)}](attention_{number}.png)"
        for number, result in enumerate(results, 1)
    ]
    parts = [
        "# What the position embeddings hold",
        "\n".join(f"- {_escaped(said)}" for said in sentences(results, noises)),
        "\n".join(_table(lines)),
        "\n".join(f"- {_escaped(said)}" for said in (*LEGEND, *CAVEATS, *notes)),
        "![tables](analysis.png)",
        *(["![planes by UMAP](umap.png)"] if has_umap else []),
        *attention,
    ]
    return "\n\n".join(parts) + "\n"


def _table(lines: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table with aligned columns: models, noise of each size, the paper."""
    cells = [["Model", *(heading for heading, _ in COLUMNS.values())]]
    cells += [_cells(_escaped(line["label"]), line) for line in lines if line["kind"] == "model"]
    drawn = [line for line in lines if line["kind"] == NOISE]
    for size in dict.fromkeys((line["grid"], line["width"]) for line in drawn):
        cells.append(_noise_cells([x for x in drawn if (x["grid"], x["width"]) == size]))
    paper = [line for line in lines if line["kind"] == PAPER]
    cells += [_cells(f"paper: {line['label']}", line) for line in paper]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in cells
    ]
    return [aligned[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *aligned[1:]]


def _cells(name: str, line: Row) -> list[str]:
    cells = [name]
    for column, (_, decimals) in COLUMNS.items():
        cell, around = _number(line.get(column), decimals), line.get(f"{column}_std")
        cells.append(cell if around is None else f"{cell}±{_number(around, decimals)}")
    return cells


def _noise_cells(lines: Sequence[Row]) -> list[str]:
    first = lines[0]
    cells = [f"noise {first['grid']}×{first['grid']}×{first['width']}, {len(lines)} seeds"]
    for column, (_, decimals) in COLUMNS.items():
        values = [float(line[column] or 0) for line in lines if column in line]
        mean = _number(sum(values) / len(values), decimals) if values else DASH
        ends = (
            f"[{_number(min(values), decimals)}, {_number(max(values), decimals)}]"
            if values
            else ""
        )
        cells.append(f"{mean} {ends}" if column in RANGED else mean)
    return cells


def _number(value: object, decimals: int) -> str:
    if not isinstance(value, int | float) or math.isnan(value):
        return DASH
    return f"{value:.{decimals}f}"


def _escaped(text: object) -> str:
    """A stranger's word in Markdown: it is no element, no link and no column."""
    word = html.escape(str(text), quote=False)
    return re.sub(r"([|`\[\]])", r"\\\1", word)


def _csv(lines: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for line in lines for column in line))
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({n: formula_free(v) if isinstance(v, str) else v for n, v in line.items()})
    return stream.getvalue()


def _json(results: Sequence[Analysed], lines: Sequence[Row]) -> dict[str, object]:
    """The rows, and whole curves by model."""
    curves = {
        result.label: {
            "variance": result.figures.variance.tolist(),
            "energy": result.figures.energy.tolist(),
        }
        for result in results
        if result.figures is not None
    }
    plain = [{name: _finite(value) for name, value in line.items()} for line in lines]
    return {"rows": plain, "curves": curves, "caveats": list(CAVEATS)}


def _finite(value: object) -> object:
    """JSON has no NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value


# the command --------------------------------------------------------------------------------------

PICTURES_DRAWN = 4
"""Photographs in a model's attention picture."""


def write_analysis(arguments: AnalysisArguments) -> Outcome:
    """Analyse the checkpoints, write all files and return what the command prints.

    write_analysis(AnalysisArguments(("cifar_vit", "cifar_vit_mjp"), Path("out"))).text
    """
    if not 0 <= arguments.seed < 1 << 63:
        raise UserError(f"--seed: expected 0 to 2**63 - 1, got {arguments.seed}.")
    if not arguments.checkpoints:
        raise UserError("mjp analyse: expected one or more checkpoints, got none. Name them.")
    if arguments.umap:
        umap_library()  # refuse before the work
    named = named_checkpoints(arguments.checkpoints, "mjp analyse")
    source = open_images(arguments.images)
    records = spread_subset(source.records, arguments.limit, arguments.seed)
    keep_apart(arguments.out, {"--images": arguments.images})
    keep_earlier(arguments.out, "analysis.csv", named, "label")
    models = [_load(checkpoint, arguments) for checkpoint in named]
    _check_comparable([checkpoint.label for checkpoint in named], models)
    out = output_folder(arguments.out)
    results: list[Analysed] = []
    failed: dict[str, str] = {}
    for checkpoint, model in zip(named, models, strict=True):
        pixels = _pixels(model, source, records, failed)
        metadata = read_metadata(checkpoint.source)
        label = checkpoint.label
        results.append(analysed(label, model, metadata, pixels, seed=arguments.seed))
        path = out / f"attention_{len(results)}.png"
        draw_attention(results[-1], pixels[:PICTURES_DRAWN], path)
    noises = _noises(results)
    draw_analysis(results, noises, out / "analysis.png")
    write_tables(results, noises, out)
    if arguments.umap:
        draw_umap(drawn_tables(results), out / "umap.png")
        write_tables(results, noises, out, has_umap=True)
    return Outcome(f"{console(results, noises)}\n{out / 'analysis.md'}", failed)


def _load(checkpoint: NamedCheckpoint, arguments: AnalysisArguments) -> LoadedModel:
    name, mean, std = checkpoint.options(arguments.model, arguments.mean, arguments.std)
    return load_model(
        name,
        checkpoint=checkpoint.source,
        unknown_init="mean_position",
        img_size=arguments.img_size,
        mean=for_all_channels(mean),
        std=for_all_channels(std),
    )


def _check_comparable(labels: Sequence[str], models: Sequence[LoadedModel]) -> None:
    """Raise unless the grids are one and some model has position embeddings."""
    tables = [position_table(model, label) for label, model in zip(labels, models, strict=True)]
    if len({model.grid for model in models}) > 1:
        sizes = zip(labels, (model.grid for model in models), strict=True)
        grids = ", ".join(f"{label} {grid}×{grid}" for label, grid in sizes)
        raise UserError(
            f"Position embeddings of different grids: {grids}. Expected one grid, for an error in "
            "patches and a share in 3 dimensions depend on it. Analyse them one by one, or "
            "resample all to one size with --img-size."
        )
    if not any(tables):
        raise UserError(
            f"{' and '.join(labels)}: no position embeddings, expected a model with a learned "
            "table whose rows differ. Name one, such as cifar_vit."
        )


def _pixels(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    failed: dict[str, str],
) -> Tensor:
    """The readable images as the model will see them, before normalisation (B, 3, S, S); `failed`
    gains the reasons of the others."""
    card = model.card
    prepare = Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
    pictures = []
    for record in records:
        try:
            pictures.append(prepare(source.decode(record, min_side=model.patch_size)))
        except ImageError as error:
            failed[record.image_id] = error.reason
    if not pictures:
        name, reason = next(iter(failed.items()))
        raise UserError(
            f"--images: none of {len(records)} images can be read: {shown(name)} is "
            f"{shown(reason)}. Give a folder or zip of photographs, or leave it out."
        )
    return torch.stack(pictures)


def _noises(results: Sequence[Analysed]) -> list[Noise]:
    """Noise in the size of every table, each size once."""
    tables = [result.table for result in results if result.table is not None]
    sizes = dict.fromkeys((table.grid, table.width) for table in tables)
    return [noise(grid, width) for grid, width in sizes]
