"""`mjp analyse` from its arguments to its files: load all models, analyse each, write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mjp_privacy.analysis.analysed import Analysed, Noise, analysed, noise
from mjp_privacy.analysis.arguments import AnalysisArguments
from mjp_privacy.analysis.picture import (
    draw_analysis,
    draw_attention,
    draw_umap,
    drawn_tables,
    umap_library,
)
from mjp_privacy.analysis.position_table import position_table
from mjp_privacy.analysis.report import console, write_tables
from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder
from mjp_privacy.core.text import shown
from mjp_privacy.data import (
    ImageError,
    ImageRecord,
    ImageSource,
    Preprocessing,
    open_images,
    spread_subset,
)
from mjp_privacy.data.places import keep_apart
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.zoo import (
    NamedCheckpoint,
    for_all_channels,
    keep_earlier,
    named_checkpoints,
)

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
