"""Segmentation, the paper's Table 9: trained, scored and set beside what is printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.progress import Progress
from mjp_privacy.data import ImageError, ImageRecord, spread_subset
from mjp_privacy.metrics.resampling import draws
from mjp_privacy.metrics.statistics import LEVEL, RESAMPLES, SEED
from mjp_privacy.models.zoo import named_checkpoints
from mjp_privacy.paper.segmentation_data import (
    VALIDATION,
    PairBatches,
    Pairs,
    Whole,
    find_pairs,
    splits_of,
)
from mjp_privacy.paper.segmentation_network import (
    PixelObjective,
    SegmentationNetwork,
    build_segmentation,
    check_initial,
    load_segmentation,
    predicted,
)
from mjp_privacy.training.batches import Batches
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.evaluation import (
    beside,
    markdown_table,
    prepare_folder,
    with_interval,
    write_report,
)
from mjp_privacy.training.evaluation_arguments import EvaluationArguments
from mjp_privacy.training.learner import Learner
from mjp_privacy.training.processes import World
from mjp_privacy.training.published import PUBLISHED
from mjp_privacy.training.trainer import Task

# scores ------------------------------------------------------------------------------------------

MEASURES = ("miou", "macc", "aacc")
Counts = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """One of the measures in percent, or a difference in points, with its 95 % bootstrap interval
    over pictures."""

    percent: float
    low: float
    high: float


def areas(answer: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(3, K) pixel counts of each class: right, in the truth, in the answer.

    answer: (H, W) classes; labels: (H, W), 0 where a pixel has no label, else 1 + its class
    """
    labelled = labels > 0
    truth, said = labels[labelled].long() - 1, answer[labelled]
    counted = (truth[truth == said], truth, said)
    return torch.stack([torch.bincount(one, minlength=classes) for one in counted])


def measured(counts: Counts) -> Counts:
    """(…, 3): mIoU, mAcc and aAcc in percent of pixel counts (…, 3, K), as MMSegmentation has them.

    The counts of each class are summed over the pictures before anything is divided:

        IoU   right / (truth + predicted − right); its mean is over classes in truth or answer
        Acc   right / truth; its mean is over classes that are in the truth
        aAcc  right pixels / labelled pixels

    Pixels without a label are left out, whatever is predicted there. A mean over nothing is NaN.
    """
    right, truth, said = np.moveaxis(counts, -2, 0)
    total = truth.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        overall = right.sum(-1) / total
    of_classes = (_mean(right, truth + said - right), _mean(right, truth), overall)
    return 100 * np.stack(of_classes, -1)


def scored(counts: Counts) -> dict[str, Score]:
    """The measures of pictures whose counts are (n, 3, K), with intervals; NaN without two."""
    return _with_interval(measured(counts.sum(0)), _resampled(counts))


def difference(counts: Counts, others: Counts) -> dict[str, Score]:
    """How much higher one model's measures are than another's on the same pictures, in points; both
    are resampled together."""
    values = measured(counts.sum(0)) - measured(others.sum(0))
    return _with_interval(values, _resampled(counts) - _resampled(others))


def _resampled(counts: Counts) -> Counts:
    """The measures of each resample of the pictures, (resamples, 3); NaN without two pictures."""
    if len(counts) < 2 or not counts.any():
        return np.full((1, len(MEASURES)), np.nan)
    flat = counts.reshape(len(counts), -1)
    return np.concatenate(
        [
            measured((times.astype(np.float64) @ flat).reshape(-1, *counts.shape[1:]))
            for times in draws(len(counts), RESAMPLES, SEED)
        ]
    )


def _with_interval(values: Counts, resampled: Counts) -> dict[str, Score]:
    known = resampled[~np.isnan(resampled).any(-1)]  # not those without a labelled pixel
    low, high = np.full((2, len(MEASURES)), np.nan)
    if len(known):
        low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    triples = zip(values.tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: Score(*triple) for name, triple in zip(MEASURES, triples, strict=True)}


def _mean(parts: Counts, wholes: Counts) -> Counts:
    """The mean of the shares of classes whose whole is not 0; NaN where there is none."""
    shares = np.divide(parts, wholes, out=np.zeros_like(parts), where=wholes > 0)
    number = (wholes > 0).sum(-1)
    with np.errstate(invalid="ignore"):
        mean: Counts = shares.sum(-1) / number
    return mean


# training -----------------------------------------------------------------------------------------


class SegmentationLearner(Learner):
    """A network with a head for every pixel; it keeps mIoU where a classifier keeps top-1."""

    measure = "val_miou"

    def _network(self) -> Any:
        return build_segmentation(self.config)

    def _objective(self) -> nn.Module:
        return PixelObjective(self.model, self.config)

    @torch.no_grad()
    def validated(self, batches: Batches) -> dict[str, float]:
        """mIoU, mAcc and aAcc of whole pictures, in percent; then training can go on."""
        network, shape = self.trained.eval(), self.config.model
        total = torch.zeros(3, shape.num_classes, dtype=torch.float64, device=self.world.device)
        for pictures, labels in batches.in_order(1):
            for picture, truth in zip(pictures, labels, strict=True):
                with self.products, self._autocast():
                    answer = predicted(network, picture, shape.img_size, truth.shape)
                total += areas(answer, truth, shape.num_classes)
        counts: Tensor = self.world.mean(total)
        self.objective.train()
        if not counts.any():
            raise UserError(
                "--data: no pixel of the validation pictures has a label, so nothing can be "
                "scored. Expected label maps with classes from 1; mend or remove this split."
            )
        values = measured(counts.cpu().numpy()).tolist()
        return {f"val_{name}": round(x, 4) for name, x in zip(MEASURES, values, strict=True)}


def pair_batches(
    config: TrainingConfig, pairs: Pairs, world: World, workers: int, used_for: str = "training"
) -> PairBatches:
    """Batches of these pictures with their label maps, all of which are checked before."""
    pairs.check()
    return PairBatches(config, pairs, world, workers)


SEGMENTATION = Task(SegmentationLearner, check_initial, find_pairs, pair_batches)


# what the paper prints ----------------------------------------------------------------------------

VALIDATION_PICTURES, CLASSES, SIDE = 2000, 150, 512
"""Of ADE20K."""
SWIN_TINY = (4, 96, 3, (2, 2, 6, 2))
"""Patch side, width and heads of the first stage, blocks of the stages."""


@dataclass(frozen=True)
class PublishedSegmentation:
    """One printed row of Table 9, in percent: UPerNet on a Swin-T trained on ImageNet-1K."""

    model: str
    miou: float
    macc: float


PLAIN, MJP = (PublishedSegmentation(**row) for row in PUBLISHED["table_9"])
CAVEAT = (
    "The paper's figures are of UPerNet on Swin-T at 512. Ours is UPerNet-style: other norms, no "
    "auxiliary head, a cosine schedule, sliding windows where MMSegmentation's UPerNet for Swin-T "
    "takes whole pictures; the authors' repository has no code for this table, so what they did "
    "beyond the text is not known."
)


def counterpart(config: TrainingConfig, pictures: int) -> PublishedSegmentation | None:
    """The printed row of a model scored on so many pictures; None unless it is the paper's model,
    fine-tuned from weights, on all of ADE20K's validation pictures."""
    model = config.model
    sizes = (model.patch_size, model.embed_dim, model.num_heads, config.stages)
    papers = config.family == "swin" and sizes == SWIN_TINY and config.segmentation.head != "linear"
    at_papers = (model.img_size, model.num_classes, pictures) == (
        SIDE,
        CLASSES,
        VALIDATION_PICTURES,
    )
    if not papers or not at_papers or config.initial is None:
        return None
    return MJP if model.unknown_embedding else PLAIN


# the table ----------------------------------------------------------------------------------------

HEADS = (
    *("Model", "head", "n", "classes", "mIoU %", "mAcc %", "aAcc %"),
    *("mIoU − first", "paper's mIoU (Δ)", "paper's mAcc (Δ)"),
)
NOTES = (
    "Pixel counts of each class are summed over the n pictures, then divided: mIoU is the mean "
    "over the classes in truth or answer, mAcc over those in the truth (`classes`), aAcc the share "
    "of all labelled pixels, as in MMSegmentation. Pixels without a label do not count.",
    "[95 % interval]: bootstrap over pictures; a resample without a rare class averages over the "
    "others. Each line is one trained model; the interval does not cover another training. mIoU − "
    "first: minus the first model's, on the same pictures, resampled together.",
    "Sliding windows of the training size, two thirds of it apart, on pictures whose short side "
    "has that size; one scale, not mirrored; answers compared at the label maps' own size.",
)


def line_of(
    label: str, config: TrainingConfig, counts: Counts, first: Counts, failed: int
) -> dict[str, object]:
    """A model's line of segmentation.csv from the pixel counts of its pictures.

    first   the counts of the first model: its mIoU is set beside where both are of the same
            pictures with the same classes, and not beside itself
    failed  the number of pictures that could not be read
    """
    paper = counterpart(config, len(counts))
    scores = scored(counts)
    same = counts.shape == first.shape and np.array_equal(counts[:, 1], first[:, 1])
    nothing = Score(math.nan, math.nan, math.nan)
    over = difference(counts, first)["miou"] if same and counts is not first else nothing
    line: dict[str, object] = {
        "model": label,
        "head": config.segmentation.head,
        "n": len(counts),
        "failed": failed,
        "classes": int(counts.sum(0)[1].astype(bool).sum()),
    }
    for name, score in {**scores, "miou_over_first": over}.items():
        line |= {name: score.percent, f"{name}_low": score.low, f"{name}_high": score.high}
    line["paper_row"] = paper.model if paper else ""
    return line | {f"paper_{name}": getattr(paper, name, None) for name in ("miou", "macc")}


def markdown(table: pd.DataFrame, unreadable: Mapping[str, Mapping[str, str]]) -> str:
    """The lines as a table with the paper's figures beside ours, and notes below.

    unreadable: by model, why pictures could not be read
    """
    notes = [*NOTES, CAVEAT] if table["paper_row"].any() else [*NOTES]
    for label, reasons in unreadable.items():
        if reasons:
            pictures, have = ("picture", "has") if len(reasons) == 1 else ("pictures", "have")
            notes.append(
                f"{label}: {len(reasons)} {pictures} could not be read and {have} no part in the "
                f"scores; the first: {next(iter(reasons.values()))}."
            )
    cells = [_cells(line) for line in table.to_dict("records")]
    return "\n".join([*markdown_table(HEADS, cells), "", *(f"- {note}" for note in notes), ""])


def _cells(line: Mapping[Any, Any]) -> tuple[str, ...]:
    n = f"{line['n']}" + (f" ({line['failed']} unreadable)" if line["failed"] else "")
    forms = {**dict.fromkeys(MEASURES, ".1f"), "miou_over_first": "+.1f"}
    scores = [
        with_interval(line[name], line[f"{name}_low"], line[f"{name}_high"], form)
        for name, form in forms.items()
    ]
    printed = [beside(line[f"paper_{name}"], line[name], ".2f") for name in ("miou", "macc")]
    return (line["model"], line["head"], n, f"{line['classes']}", *scores, *printed)


# `mjp evaluate --ade20k` --------------------------------------------------------------------------

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
    prepare_folder(arguments, "segmentation.csv", "ade20k")
    lines: list[dict[str, object]] = []
    rows: list[pd.DataFrame] = []
    unreadable: dict[str, Mapping[str, str]] = {}
    text, table = "", pd.DataFrame()
    for line, mine, reasons in _measured(arguments, arguments.ade20k):
        label = str(line["model"])
        lines.append(line)
        rows.append(mine.assign(model=label))
        unreadable[label] = reasons
        table = pd.DataFrame(lines)
        text = markdown(table, unreadable)
        if arguments.out:
            tables = {"per_picture.csv": pd.concat(rows), "segmentation.csv": table}
            write_report(arguments.out, tables, "segmentation.md", text)
    failed = {name: why for reasons in unreadable.values() for name, why in reasons.items()}
    return Outcome(text, failed, table.to_dict("records"))


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
) -> Iterator[tuple[dict[str, object], pd.DataFrame, dict[str, str]]]:
    """Each checkpoint's line and rows, and why pictures could not be read; all are loaded first, so
    that mistakes show at once."""
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
        first = counts if first is None else first
        line = line_of(model.label, model.config, counts, first, len(unreadable))
        yield line, rows, unreadable


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
    columns = ["image_id", "class", "right", "truth", "answer"]
    rows: list[tuple[object, ...]] = []
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
            for number in np.flatnonzero(of_picture.any(0)):
                rows.append((name, int(number), *of_picture[:, number].tolist()))
    if not counts:
        first = next(iter(unreadable.values()), "--limit 0")
        raise UserError(
            f"--ade20k: {model.label}: expected pictures that can be scored, got none of "
            f"{len(places)}; the first: {first}. Repair them, or give another folder."
        )
    stacked = np.stack(counts).astype(np.float64)
    return pd.DataFrame(rows, columns=columns), stacked, unreadable
