"""Measures trained models on the same images, shuffled in the same way.

Top-1, top-5, Diff. Norm. and Consistency in the layout of the paper's Tables 1, 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.progress import Progress
from mjp_privacy.data import ImageRecord, open_images, spread_subset
from mjp_privacy.data.places import keep_apart
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.zoo import (
    NamedCheckpoint,
    for_all_channels,
    keep_earlier,
    named_checkpoints,
)
from mjp_privacy.training.consistency import embedding_condition, measure
from mjp_privacy.training.evaluation_arguments import EvaluationArguments
from mjp_privacy.training.evaluation_report import (
    Evaluated,
    draw_sweep,
    markdown,
    summary_table,
)
from mjp_privacy.training.examples import numbered
from mjp_privacy.training.protocols import AUTHORS_MEAN, AUTHORS_STD, protocols
from mjp_privacy.training.published import TABLE4, PublishedModel, counterpart_in


def write_evaluation(arguments: EvaluationArguments) -> Outcome:
    """The table of all checkpoints as Markdown; files in --out are updated after each checkpoint.

    write_evaluation(EvaluationArguments(("cifar_vit",), Path("cifar10-test.zip"))).text
    """
    check_options(arguments)
    if arguments.out:
        keep_apart(arguments.out, {"--data": arguments.data})
        named = named_checkpoints(arguments.checkpoint, "--checkpoint")
        keep_earlier(output_folder(arguments.out), "summary.csv", named)
    models: list[Evaluated] = []
    text = ""
    for model in evaluate(arguments):
        models.append(model)
        table = summary_table(models, arguments.preset)
        text = markdown(table, models)
        if arguments.out:
            _write(arguments.out, models, table, text)
    failed = {k: v for model in models for k, v in model.failed.items()}
    return Outcome(text, failed, summary_table(models, arguments.preset).to_dict("records"))


def check_options(arguments: EvaluationArguments) -> None:
    """Raise for options outside their bounds."""
    for gamma in arguments.gamma or ():
        if not 0 <= gamma <= 1:
            raise UserError(f"--gamma is a share of the patches: expected 0 to 1, got {gamma}.")
    if not 0 <= arguments.seed < 1 << 63:
        raise UserError(f"--seed: expected 0 to 2**63 - 1, got {arguments.seed}.")
    if not arguments.checkpoint or arguments.gamma == ():
        raise UserError("--checkpoint and --gamma: expected at least one each, got none.")
    if arguments.paper_row is not None and arguments.paper_row not in TABLE4:
        raise UserError(
            f"--paper-row: expected one of {', '.join(TABLE4)}, got {arguments.paper_row!r}."
        )


def evaluate(arguments: EvaluationArguments) -> Iterator[Evaluated]:
    """Measure one checkpoint after the other; all are loaded first, so mistakes show at once."""
    if arguments.data is None:
        raise UserError(
            "mjp evaluate: expected images, got none. Give --data for accuracy and consistency, or "
            "--imagenet-c, --imagenet-a or --imagenet-o for robustness."
        )
    source = open_images(arguments.data, arguments.labels)
    records = spread_subset(source.records, arguments.limit, arguments.seed)
    device = pick_device(arguments.device)
    measured = protocols(arguments.preset, arguments.gamma)
    named = named_checkpoints(arguments.checkpoint, "--checkpoint")
    loaded = [(checkpoint, load_checkpoint(checkpoint, arguments)) for checkpoint in named]
    for checkpoint, model in loaded:
        label = checkpoint.label
        check_labels(label, model, source.records)
        with Progress(label, lambda: len(records) * len(measured), "images") as bar:
            rows = pd.concat(
                measure(
                    model.to(device),
                    source,
                    records,
                    protocol,
                    seed=arguments.seed,
                    progress=bar.advance,
                )
                for protocol in measured
            )
        yield Evaluated(
            label,
            rows,
            model.card.trained_gamma,
            papers_row(checkpoint, arguments),
            embedding_condition(model),
            tuple(f"{label}: {note}" for note in model.card.checkpoint.notes),
        )


def check_labels(
    label: str, model: LoadedModel, records: Sequence[ImageRecord], option: str = "--data"
) -> None:
    """Raise if the images' labels are not the model's class indices."""
    largest = max((record.label for record in records if record.label is not None), default=0)
    if largest >= model.card.num_classes:
        raise UserError(
            f"{option} holds a label {largest}, but {label} has {model.card.num_classes} classes: "
            "expected labels of the data the model was trained on. Give --labels, or other images."
        )
    classes = {record.label for record in records} - {None}
    by_name = bool(records) and records[0].label_source == "folder" and not numbered(records)
    if by_name and len(classes) != model.card.num_classes:
        raise UserError(
            f"{option} has {len(classes)} class folders, but {label} has {model.card.num_classes} "
            "classes: plain folders are numbered in sorted order, so if some are missing the "
            "others get wrong numbers. Expected all class folders, folders named by the class "
            "index, or --labels."
        )


def load_checkpoint(checkpoint: NamedCheckpoint, arguments: EvaluationArguments) -> LoadedModel:
    """The network of a checkpoint, with what the command line says of it."""
    authors = arguments.preset == "authors_code"
    name, mean, std = checkpoint.options(arguments.model, arguments.mean, arguments.std)
    mean = AUTHORS_MEAN if authors and arguments.mean is None else mean
    std = AUTHORS_STD if authors and arguments.std is None else std
    overrides: dict[str, Any] = {
        "img_size": arguments.img_size,
        "mean": for_all_channels(mean),
        "std": for_all_channels(std),
        "position_embedding": arguments.position_embedding,
        "unknown_embedding": arguments.unknown_embedding,
    }
    return load_model(name, checkpoint=checkpoint.source, unknown_init="mean_position", **overrides)


def papers_row(
    checkpoint: NamedCheckpoint, arguments: EvaluationArguments
) -> PublishedModel | None:
    """The paper's row to stand beside: the one the user names, or the one that fits the switches
    which our trainer wrote into the file."""
    if arguments.paper_row is not None:
        return TABLE4[arguments.paper_row]
    return counterpart_in(read_metadata(checkpoint.source))


def _write(out: Path, models: Sequence[Evaluated], table: pd.DataFrame, text: str) -> None:
    rows = pd.concat([model.rows.assign(model=model.label) for model in models])
    write_atomically(out / "per_image.csv", lambda path: rows.to_csv(path, index=False))
    write_atomically(out / "summary.csv", lambda path: table.to_csv(path, index=False))
    write_atomically(out / "table.md", lambda path: path.write_text(text, encoding="utf-8"))
    if table["gamma"].nunique() > 1:
        draw_sweep(table, out / "sweep.png")
