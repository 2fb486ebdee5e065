"""`mjp analyse`: from its arguments to the tables and files."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.core.command import Outcome, plain_value
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically, write_json
from mjp_privacy.core.text import formula_free, shown
from mjp_privacy.data import ImageRecord, ImageSource, open_images, spread_subset
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
    REPEATS,
    Analysed,
    Noise,
    PositionTable,
    figures_of,
    last_attention,
    noise,
    position_table,
    start_in,
)
from mjp_privacy.paper.positions_picture import (
    draw_analysis,
    draw_attention,
    draw_umap,
    drawn_tables,
    umap_library,
)
from mjp_privacy.training.config import PUBLISHED
from mjp_privacy.training.evaluation import (
    Protocol,
    markdown_table,
    opened_batches,
    shown_number,
    with_interval,
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


# the answer in words: a sentence a model ----------------------------------------------------------

READ = 0.5
"""Of the error of a constant guess: below it the patches' places count as read."""


def sentence(result: Analysed, noises: Sequence[Noise]) -> str:
    if result.figures is None:
        return f"{result.label}: has no position embeddings, so nothing tells a place."
    numbers, start, learned = result.figures.numbers, result.start, result.learned
    size = [numbers["grid"], numbers["width"]]
    of_size = next(n for n in noises if size == [n[0].numbers["grid"], n[0].numbers["width"]])
    shares = [figures.numbers["variance_3"] for figures in of_size]
    kept = ""
    if start is not None and learned is not None:
        verdict = "mostly the noise it started from"
        kept = (
            f"; {100 * start.share:.1f} % of the variance is still that of its start, N(0, "
            f"{start.std:.1g}²); of what was learned beside it 3 dimensions hold "
            f"{learned.numbers['variance_3']:.1f} %"
        )
    elif numbers["mae_2d"] <= READ * numbers["constant_2d"]:
        verdict = "the patches' places can be read from it"
    else:
        verdict = "a linear map reads little of the patches' places"
    return (
        f"{result.label}: {verdict}. 3 dimensions hold {numbers['variance_3']:.1f} % of the "
        f"variance (noise {min(shares):.1f} to {max(shares):.1f}), a linear map misses a patch by "
        f"{numbers['mae_2d']:.2f} (a constant by {numbers['constant_2d']:.2f}){kept}."
    )


# the figures as flat rows: of a `model`, of `noise`, of the `paper` -------------------------------

Row = dict[str, Any]
OF_SIZE = ("grid", "width", "constant_1d", "constant_2d")
"""Numbers of a table that its size says."""


def rows(results: Sequence[Analysed], noises: Sequence[Noise]) -> list[Row]:
    """One for each model, each drawn table of noise, and each model of the paper.

    Shares are in percent, errors in patches.
    """
    lines: list[Row] = []
    for result in results:
        line: Row = {"kind": "model", "label": result.label, "architecture": result.architecture}
        line["trained_gamma"] = result.trained_gamma
        line |= result.figures.numbers if result.figures is not None else {}
        if result.start is not None and result.rest is not None:
            start, rest = result.start, result.rest.numbers
            line |= {"start_std": start.std, "start_left": start.left}
            line["start_share"] = 100 * start.share
            line |= {f"rest_{name}": rest[name] for name in rest if name not in OF_SIZE}
        looked = result.attention
        line |= {"head_diversity": looked.head_diversity, "image_diversity": looked.image_diversity}
        lines.append(line | {"attention_spread": looked.spread, "images": result.images})
    for drawn in noises:
        about = {"kind": "noise", "label": "N(0, 1), not trained"}
        lines += [{**about, **f.numbers, "seed": seed} for seed, f in enumerate(drawn)]
    for published in PRINTED:
        line = {"kind": "paper", "label": published["model"], "grid": GRID, "width": WIDTH}
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
    "Planes: PCA. UMAP's, which Figures 1 and 7 show, depends on a seed and two settings that the "
    "paper does not print (--umap draws it from two seeds); the regression measures what such a "
    "picture suggests.",
)


def write_tables(
    results: Sequence[Analysed], noises: Sequence[Noise], out: Path, *, has_umap: bool
) -> str:
    """Write analysis.md, analysis.csv and analysis.json into a folder; what the command prints."""
    lines, said = rows(results, noises), [sentence(result, noises) for result in results]
    table = pd.DataFrame(lines)
    table = table.astype({name: "Int64" for name in COUNTS if name in table})
    table["label"] = table["label"].map(formula_free)
    cells = markdown_table(["Model", *(head for head, _ in COLUMNS.values())], _cells(lines))
    notes = [f"{result.label}: {note}" for result in results for note in result.notes]
    parts = [
        "# What the position embeddings hold",
        "\n".join(f"- {_escaped(words)}" for words in said),
        "\n".join(cells),
        "\n".join(f"- {_escaped(words)}" for words in (*LEGEND, *CAVEATS, *notes)),
        "![tables](analysis.png)",
        *(["![planes by UMAP](umap.png)"] if has_umap else []),
        *(
            f"![attention of {_escaped(result.label)}](attention_{number}.png)"
            for number, result in enumerate(results, 1)
        ),
    ]
    markdown = "\n\n".join(parts) + "\n"
    curves = {
        result.label: {"variance": figures.variance.tolist(), "energy": figures.energy.tolist()}
        for result in results
        if (figures := result.figures) is not None
    }
    content = {"rows": lines, "curves": curves, "caveats": CAVEATS}
    write_atomically(out / "analysis.csv", partial(table.to_csv, index=False))
    write_json(out / "analysis.json", plain_value(content))
    write_atomically(out / "analysis.md", lambda place: place.write_text(markdown, "utf-8"))
    return "\n".join([*said, "", *cells])


def _cells(lines: Sequence[Row]) -> Iterator[list[str]]:
    """Models, noise of each size, the paper."""
    frame = pd.DataFrame(lines)
    frame = frame.reindex(columns=list(dict.fromkeys([*frame, *COLUMNS])))
    for (kind, *_), same in frame.groupby(["kind", "grid", "width"], sort=False, dropna=False):
        if kind != "noise":
            for line in same.to_dict("records"):
                name = f"paper: {line['label']}" if kind == "paper" else _escaped(line["label"])
                cells = []
                for column, (_, decimals) in COLUMNS.items():
                    number = shown_number(line.get(column), f".{decimals}f")
                    around = line.get(f"{column}_std")
                    cells.append(number if pd.isna(around) else f"{number}±{around:.{decimals}f}")
                yield [name, *cells]
            continue
        first, cells = same.iloc[0], []
        for column, (_, decimals) in COLUMNS.items():
            values = same[column]
            low, high = (values.min(), values.max()) if column in RANGED else (math.nan, math.nan)
            cells.append(with_interval(values.mean(), low, high, f".{decimals}f"))
        yield [f"noise {first.grid}×{first.grid}×{first.width}, {len(same)} seeds", *cells]


def _escaped(text: object) -> str:
    """A stranger's word in Markdown: it is no element and no link."""
    return re.sub(r"([`\[\]])", r"\\\1", html.escape(str(text), quote=False))


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
    loaded = _loaded(named, arguments)
    out = output_folder(arguments.out)
    results: list[Analysed] = []
    failed: dict[str, str] = {}
    for checkpoint, (model, table) in zip(named, loaded, strict=True):
        pixels = _pixels(model, source, records, failed)
        start = start_in(model, table, read_metadata(checkpoint.source)) if table else None
        result = Analysed(
            checkpoint.label,
            model.card.architecture,
            model.card.trained_gamma,
            figures_of(table, seed=arguments.seed) if table else None,
            start,
            figures_of(start.rest, seed=arguments.seed) if start else None,
            last_attention(model, model.normalize(pixels)),
            len(pixels),
            model.card.checkpoint.notes,
        )
        results.append(result)
        path = out / f"attention_{len(results)}.png"
        draw_attention(result, pixels[:PICTURES_DRAWN], path)
    sizes = dict.fromkeys((table.grid, table.width) for _, table in loaded if table is not None)
    noises = [noise(*size) for size in sizes]
    draw_analysis(results, noises, out / "analysis.png")
    if arguments.umap:
        draw_umap(drawn_tables(results), out / "umap.png")
    text = write_tables(results, noises, out, has_umap=arguments.umap)
    return Outcome(f"{text}\n{out / 'analysis.md'}", failed)


def _loaded(
    named: Sequence[NamedCheckpoint], arguments: AnalysisArguments
) -> list[tuple[LoadedModel, PositionTable | None]]:
    """The models with their tables; UserError unless the grids are one and some table is there."""
    loaded: list[tuple[LoadedModel, PositionTable | None]] = []
    for checkpoint in named:
        name, mean, std = checkpoint.options(arguments.model, arguments.mean, arguments.std)
        model = load_model(
            name,
            checkpoint=checkpoint.source,
            unknown_init="mean_position",
            img_size=arguments.img_size,
            mean=for_all_channels(mean),
            std=for_all_channels(std),
        )
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
    failed: dict[str, str],
) -> Tensor:
    """The readable images as the model will see them, before normalisation (B, 3, S, S); `failed`
    gains the reasons of the others."""

    def unreadable(record: ImageRecord, reason: str) -> None:
        failed[record.image_id] = reason

    prepare = Protocol().preparation(model)
    batches = opened_batches(model, source, records, prepare, unreadable)
    pictures = [images for _, images in batches]
    if not pictures:
        name, reason = next(iter(failed.items()))
        raise UserError(
            f"--images: none of {len(records)} images can be read: {shown(name)} is "
            f"{shown(reason)}. Give a folder or zip of photographs, or leave it out."
        )
    return torch.cat(pictures)
