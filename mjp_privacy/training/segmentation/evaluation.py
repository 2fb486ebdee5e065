"""`mjp evaluate --ade20k`: networks trained with task segmentation, on the same pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, write_atomically
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.progress import Progress
from mjp_privacy.data import ImageError, ImageRecord, spread_subset
from mjp_privacy.data.places import keep_apart
from mjp_privacy.models.zoo import keep_earlier, named_checkpoints
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.evaluation_arguments import EvaluationArguments
from mjp_privacy.training.segmentation.augmentation import Whole
from mjp_privacy.training.segmentation.network import SegmentationNetwork
from mjp_privacy.training.segmentation.pairs import VALIDATION, Pairs, splits_of
from mjp_privacy.training.segmentation.published import counterpart
from mjp_privacy.training.segmentation.report import Segmented, markdown, table_of
from mjp_privacy.training.segmentation.scores import Counts, Score, areas, difference, scored
from mjp_privacy.training.segmentation.stored import load_segmentation
from mjp_privacy.training.segmentation.windows import predicted

READ = ("ade20k", "checkpoint", "limit", "seed", "device", "out", "json")
"""The options that segmentation reads; any other that is given is refused."""


@dataclass(frozen=True)
class _Loaded:
    label: str
    network: SegmentationNetwork
    config: TrainingConfig
    pairs: Pairs


def write_segmentation(arguments: EvaluationArguments) -> Outcome:
    """The table of all checkpoints as Markdown; files in --out are updated after each of them."""
    assert arguments.ade20k is not None
    _check_options(arguments)
    if arguments.out:
        keep_apart(arguments.out, {"--ade20k": arguments.ade20k})
        named = named_checkpoints(arguments.checkpoint, "--checkpoint")
        keep_earlier(output_folder(arguments.out), "segmentation.csv", named)
    models: list[Segmented] = []
    rows: list[pd.DataFrame] = []
    text = ""
    for model, mine in _measured(arguments, arguments.ade20k):
        models.append(model)
        rows.append(mine.assign(model=model.label))
        text = markdown(models)
        if arguments.out:
            _write(arguments.out, models, pd.concat(rows), text)
    failed = {k: v for model in models for k, v in model.unreadable.items()}
    return Outcome(text, failed, table_of(models).to_dict("records"))


def _check_options(arguments: EvaluationArguments) -> None:
    given = [
        field.name
        for field in fields(arguments)
        if field.name not in READ and getattr(arguments, field.name) != field.default
    ]
    if given or not arguments.checkpoint:
        option = f"--{given[0].replace('_', '-')}" if given else "no --checkpoint"
        raise UserError(
            f"--ade20k measures segmentation alone: expected --checkpoint, --limit, --seed, "
            f"--device and --out beside it, got {option}."
        )


def _measured(
    arguments: EvaluationArguments, folder: Path
) -> Iterator[tuple[Segmented, pd.DataFrame]]:
    """Each checkpoint's scores and rows; all are loaded first, so that mistakes show at once."""
    device = pick_device(arguments.device)
    loaded = []
    for checkpoint in named_checkpoints(arguments.checkpoint, "--checkpoint"):
        network, config = load_segmentation(checkpoint.source)
        loaded.append(_Loaded(checkpoint.label, network, config, _validation(folder, config)))
    pairs = loaded[0].pairs  # of the same pictures for every model
    places = _places(pairs, arguments.limit, arguments.seed)
    _check_labels(loaded, pairs.largest_label(places))
    first: Counts | None = None
    for model in loaded:
        model.network.to(device)
        rows, counts, unreadable = _answers(model, places, device)
        scores, config = scored(counts), model.config
        present = int(counts.sum(0)[1].astype(bool).sum())
        paper = counterpart(config, len(counts))
        over = None if first is None else _over(counts, first)
        first = counts if first is None else first
        head, number = config.segmentation.head, len(counts)
        yield (
            Segmented(model.label, head, scores, number, present, unreadable, paper, over),
            rows,
        )


def _check_labels(models: Sequence[_Loaded], largest: int) -> None:
    """Refuse models with fewer classes than the label maps: the pictures left would be a choice of
    the easier ones."""
    for model in models:
        if largest > (classes := model.config.model.num_classes):
            raise UserError(
                f"--ade20k: {model.label}: labels up to {largest}, the model has {classes} "
                "classes. Expected the classes that the model was trained on: give its data, or a "
                "model of this data."
            )


def _over(counts: Counts, first: Counts) -> Score | None:
    """How much higher the mIoU is than the first model's; None if these are not the same pictures
    with the same classes."""
    same = counts.shape == first.shape and np.array_equal(counts[:, 1], first[:, 1])
    return difference(counts, first)["miou"] if same else None


def _validation(folder: Path, config: TrainingConfig) -> Pairs:
    splits = splits_of(folder, config.model.num_classes, "--ade20k")
    if VALIDATION not in splits:
        raise UserError(
            f"--ade20k: expected pictures under images/{VALIDATION}, got none. Give the folder "
            "that holds this split."
        )
    return splits[VALIDATION]


def _places(pairs: Pairs, limit: int | None, seed: int) -> list[int]:
    """Which pictures to measure: all, or `limit` of them as every command chooses them."""
    place = {name: number for number, name in enumerate(pairs.pictures)}
    records = [ImageRecord(name) for name in pairs.pictures]
    return [place[record.image_id] for record in spread_subset(records, limit, seed)]


@torch.no_grad()
def _answers(
    model: _Loaded, places: Sequence[int], device: torch.device
) -> tuple[pd.DataFrame, Counts, dict[str, str]]:
    """A row for each picture and class that occurs in truth or answer, the counts of all pictures
    (n, 3, K), and why others could not be read, by the picture."""
    shape, prepare = model.config.model, Whole(model.config)
    rows: list[dict[str, object]] = []
    counts: list[Any] = []
    unreadable: dict[str, str] = {}
    with Progress(model.label, lambda: len(places), "images") as bar:
        for place in places:
            name = model.pairs.pictures[place]
            bar.advance()
            try:
                picture, labels = prepare(*model.pairs.read(place))
            except ImageError as error:
                unreadable[name] = str(error)
                continue
            answer = predicted(model.network, picture.to(device), shape.img_size, labels.shape)
            of_picture = areas(answer.cpu(), labels, shape.num_classes).numpy()
            counts.append(of_picture)
            rows += _rows(name, of_picture)
    if not counts:
        first = next(iter(unreadable.values()), "--limit 0")
        raise UserError(
            f"--ade20k: {model.label}: expected pictures that can be scored, got none of "
            f"{len(places)}; the first: {first}. Repair them, or give another folder."
        )
    columns = ["image_id", "class", "right", "truth", "answer"]
    stacked = np.stack(counts).astype(np.float64)
    return pd.DataFrame(rows, columns=columns), stacked, unreadable


def _rows(image_id: str, counts: Counts) -> Iterator[dict[str, object]]:
    """A row for each class that occurs in a picture's truth or answer."""
    for number in np.flatnonzero(counts.any(0)):
        right, truth, answer = (int(count) for count in counts[:, number])
        yield {
            "image_id": image_id,
            "class": int(number),
            "right": right,
            "truth": truth,
            "answer": answer,
        }


def _write(out: Path, models: Sequence[Segmented], rows: pd.DataFrame, text: str) -> None:
    table = table_of(models)
    write_atomically(out / "per_picture.csv", lambda path: rows.to_csv(path, index=False))
    write_atomically(out / "segmentation.csv", lambda path: table.to_csv(path, index=False))
    write_atomically(out / "segmentation.md", lambda path: path.write_text(text, encoding="utf-8"))
