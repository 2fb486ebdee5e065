"""Trained models measured on the same images and the same puzzles.

Top-1, top-5, Diff. Norm. and Consistency in the layout of the paper's Tables 1, 3 and 4.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mjp_privacy.core.device import pick_device
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically
from mjp_privacy.data import ImageRecord, open_images, spread_subset
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.zoo import NAMED_MODELS
from mjp_privacy.training.consistency import embedding_condition, measure
from mjp_privacy.training.evaluation_arguments import EvaluationArguments
from mjp_privacy.training.evaluation_report import (
    Evaluated,
    draw_sweep,
    markdown,
    summary_table,
)
from mjp_privacy.training.examples import numbered
from mjp_privacy.training.published import TABLE4, PublishedModel, counterpart


def write_evaluation(given: EvaluationArguments) -> str:
    """The table of all checkpoints; with --out its files are written after each of them."""
    for gamma in given.gamma:
        if not 0 <= gamma <= 1:
            raise UserError(f"--gamma is a share of the patches: expected 0 to 1, got {gamma}.")
    if given.paper_row is not None and given.paper_row not in TABLE4:
        raise UserError(
            f"--paper-row: expected one of {', '.join(TABLE4)}, got {given.paper_row!r}."
        )
    if given.out:
        output_folder(given.out)
    models: list[Evaluated] = []
    text = ""
    for model in evaluate(given):
        models.append(model)
        table = summary_table(models)
        text = markdown(table, models)
        if given.out:
            _write(given.out, models, table, text)
    return text


def evaluate(given: EvaluationArguments) -> Iterator[Evaluated]:
    """Every checkpoint on the same images and the same puzzles; all are loaded before the first."""
    source = open_images(given.data, given.labels)
    records = spread_subset(source.records, given.limit, given.seed)
    device = pick_device(given.device)
    loaded = [(item, *_load(item, given)) for item in given.checkpoint]
    labels = [label for _, label, _ in loaded]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise UserError(
            f"Two checkpoints are called {twice[0]!r}: expected a name of its own for each. Give "
            "--checkpoint NAME=PATH NAME=PATH."
        )
    for item, label, model in loaded:
        _check_labels(label, model, source.records)
        rows = measure(
            model.to(device),
            source,
            records,
            sorted(set(given.gamma)),
            seed=given.seed,
            progress=_Progress(label, len(records)),
        )
        yield Evaluated(
            label,
            rows,
            model.card.trained_gamma,
            _paper(item, given),
            embedding_condition(model),
            tuple(f"{label}: {note}" for note in model.card.checkpoint.notes),
        )


def _check_labels(label: str, model: LoadedModel, records: Sequence[ImageRecord]) -> None:
    """A label the model has not means that folders were numbered otherwise than its classes."""
    largest = max((record.label for record in records if record.label is not None), default=0)
    if largest >= model.card.num_classes:
        raise UserError(
            f"--data holds a label {largest}, but {label} has {model.card.num_classes} classes: "
            "expected labels of the data the model was trained on. Give --labels, or other images."
        )
    found = {record.label for record in records} - {None}
    by_name = bool(records) and records[0].label_source == "folder" and not numbered(records)
    if by_name and len(found) != model.card.num_classes:
        raise UserError(
            f"--data has {len(found)} class folders, but {label} has {model.card.num_classes} "
            "classes: plain folders are numbered in sorted order, so a part of them means other "
            "classes. Expected all of them, folders named by the class index, or --labels."
        )


def _load(item: str, given: EvaluationArguments) -> tuple[str, LoadedModel]:
    label, path = _label_and_path(item)
    overrides: dict[str, Any] = {
        "img_size": given.img_size,
        "mean": _channels(given.mean),
        "std": _channels(given.std),
        "position_embedding": given.position_embedding,
        "unknown_embedding": given.unknown_embedding,
    }
    source = _source(path)
    return label, load_model(
        given.model, checkpoint=source, unknown_init="mean_position", **overrides
    )


def _source(path: str) -> str:
    """The checkpoint behind a model's name, or the path itself."""
    named = NAMED_MODELS[path].checkpoint if path in NAMED_MODELS else None
    return named or path


def _channels(numbers: tuple[float, ...] | None) -> float | tuple[float, ...] | None:
    return numbers[0] if numbers is not None and len(numbers) == 1 else numbers


def _label_and_path(item: str) -> tuple[str, str]:
    if "=" in item and not Path(item).exists():
        label, _, path = item.partition("=")
        return label, path
    file = Path(item)
    if not file.is_file():
        return item, item
    generic = file.stem in ("model", "model_float16", "checkpoint")
    return file.resolve().parent.name if generic else file.stem, item


def _paper(item: str, given: EvaluationArguments) -> PublishedModel | None:
    """By the switches our trainer wrote into the file, or as the user says."""
    if given.paper_row is not None:
        return TABLE4[given.paper_row]
    metadata = read_metadata(_source(_label_and_path(item)[1]))
    return counterpart(json.loads(metadata["recipe"])) if "recipe" in metadata else None


class _Progress:
    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.started = self.said = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            rate = done / (self.said - self.started)
            left = (self.total - done) / rate
            print(
                f"{self.label}: {done}/{self.total} · {rate:.0f} images/s · {left:.0f} s left",
                file=sys.stderr,
            )


def _write(out: Path, models: Sequence[Evaluated], table: pd.DataFrame, text: str) -> None:
    rows = pd.concat([model.rows.assign(model=model.label) for model in models])
    write_atomically(out / "per_image.csv", lambda path: rows.to_csv(path, index=False))
    write_atomically(out / "summary.csv", lambda path: table.to_csv(path, index=False))
    write_atomically(out / "table.md", lambda path: path.write_text(text, encoding="utf-8"))
    if table["gamma"].nunique() > 1:
        draw_sweep(table, out / "sweep.png")
