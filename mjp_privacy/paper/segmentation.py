"""Segmentation, the paper's Table 9: trained, scored and set beside what is printed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.core.command import Outcome, check_idle
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.progress import Progress
from mjp_privacy.data import ImageError, ImageRecord, spread_subset
from mjp_privacy.metrics.statistics import LEVEL, RESAMPLES, SEED, draws
from mjp_privacy.models.zoo import named_checkpoints
from mjp_privacy.paper.networks import SegmentationNetwork, predicted
from mjp_privacy.paper.segmentation_training import (
    VALIDATION,
    Pairs,
    PixelObjective,
    Whole,
    build_segmentation,
    find_pairs,
    load_segmentation,
    pair_batches,
    splits_of,
)
from mjp_privacy.training.batches import Batches
from mjp_privacy.training.commands import EvaluationArguments
from mjp_privacy.training.config import PUBLISHED, TrainingConfig
from mjp_privacy.training.evaluation import (
    beside,
    counted,
    interval_of,
    noted_table,
    prepare_folder,
    write_report,
)
from mjp_privacy.training.learner import Learner

# scores ------------------------------------------------------------------------------------------

MEASURES = ("miou", "macc", "aacc")
Counts = NDArray[np.float64]


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
    with np.errstate(invalid="ignore"):
        overall = right.sum(-1) / truth.sum(-1)
        shares = np.stack([right / (truth + said - right), right / truth])  # NaN: no such class
        means = np.nansum(shares, -1) / (~np.isnan(shares)).sum(-1)
    return 100 * np.stack([*means, overall], -1)


def scored(counts: Counts, others: Counts | None = None) -> dict[str, float]:
    """The measures of pictures whose counts are (n, 3, K), each with its 95 % bootstrap interval:
    miou, miou_low, miou_high, …; NaN without two pictures.

    others  another model's counts of the same pictures: how much higher the measures are than its
            own, in points; both are resampled together
    """
    values, resampled = measured(counts.sum(0)), _resampled(counts)
    if others is not None:
        values = values - measured(others.sum(0))
        resampled = resampled - _resampled(others)
    known = resampled[~np.isnan(resampled).any(-1)]  # not those without a labelled pixel
    ends = np.full((2, len(MEASURES)), np.nan)
    if len(known):
        ends = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    names = [f"{name}{end}" for name in MEASURES for end in ("", "_low", "_high")]
    return dict(zip(names, np.stack([values, *ends], -1).ravel().tolist(), strict=True))


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


# training -----------------------------------------------------------------------------------------


class SegmentationLearner(Learner):
    """A network with a head for every pixel; it keeps mIoU where a classifier keeps top-1."""

    measure = "val_miou"
    find = staticmethod(find_pairs)
    batches = staticmethod(pair_batches)
    network = staticmethod(build_segmentation)
    loss = PixelObjective

    @torch.no_grad()
    def validated(self, batches: Batches) -> dict[str, float]:
        """mIoU, mAcc and aAcc of whole pictures, in percent; then training can go on."""
        network, shape = self.trained.eval(), self.config.model
        total = torch.zeros(3, shape.num_classes, dtype=torch.float64, device=self.world.device)
        for pictures, labels in batches.in_order(1):
            for picture, truth in zip(pictures, labels, strict=True):
                with self._autocast():
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


# what the paper prints ----------------------------------------------------------------------------

VALIDATION_PICTURES, CLASSES, SIDE = 2000, 150, 512
"""Of ADE20K."""
SWIN_TINY = (4, 96, 3, (2, 2, 6, 2))
"""Patch side, width and heads of the first stage, blocks of the stages."""


PLAIN, MJP = PUBLISHED["table_9"]
"""The printed rows, in percent: UPerNet on a Swin-T trained on ImageNet-1K."""
CAVEAT = (
    "The paper's figures are of UPerNet on Swin-T at 512. Ours is UPerNet-style: other norms, no "
    "auxiliary head, a cosine schedule, sliding windows where MMSegmentation's UPerNet for Swin-T "
    "takes whole pictures; the authors' repository has no code for this table, so what they did "
    "beyond the text is not known."
)


def counterpart(config: TrainingConfig, pictures: int) -> Mapping[str, Any]:
    """The printed row of a model scored on so many pictures; empty unless it is the paper's model,
    fine-tuned from weights, on all of ADE20K's validation pictures."""
    model, head = config.model, config.segmentation.head
    sizes = (model.patch_size, model.embed_dim, model.num_heads, config.stages)
    data = (model.img_size, model.num_classes, pictures)
    if (
        (config.family, sizes) != ("swin", SWIN_TINY)
        or (head == "linear" or config.initial is None)
        or data != (SIDE, CLASSES, VALIDATION_PICTURES)
    ):
        return {}
    return MJP if model.unknown_embedding else PLAIN


# `mjp evaluate --ade20k` --------------------------------------------------------------------------

READ = ("ade20k", "checkpoint", "limit", "seed", "device", "out", "json")
"""The options that segmentation reads; any other that is given is refused."""
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


def write_segmentation(arguments: EvaluationArguments) -> Outcome:
    """The table of all checkpoints as Markdown; files in --out are updated after each of them."""
    assert arguments.ade20k is not None
    others = {option.name for option in fields(arguments)} - {*READ}
    check_idle(arguments, others, "--ade20k measures segmentation alone")
    prepare_folder(arguments, "ade20k")
    named = named_checkpoints(arguments.checkpoint, "--checkpoint")
    loaded = [load_segmentation(checkpoint.source) for checkpoint in named]
    pairs = splits_of(arguments.ade20k, loaded[0][1].model.num_classes, "--ade20k").get(VALIDATION)
    if pairs is None:
        raise UserError(
            f"--ade20k: expected pictures under images/{VALIDATION}, got none. Give the folder "
            "that holds this split."
        )
    records = [ImageRecord(name) for name in pairs.pictures]
    chosen = spread_subset(records, arguments.limit, arguments.seed)
    places = [pairs.pictures.index(record.image_id) for record in chosen]
    lines: list[dict[str, object]] = []
    rows: list[pd.DataFrame] = []
    failed: dict[str, str] = {}
    first: Counts | None = None
    text, table = "", pd.DataFrame()
    for checkpoint, (network, config) in zip(named, loaded, strict=True):
        label, own = checkpoint.label, replace(pairs, classes=config.model.num_classes)
        network = network.to(pick_device(arguments.device))
        with Progress(label, len(places), "images") as bar:
            mine, counts, unreadable = _answers(network, config, own, places, bar)
        failed |= unreadable
        if not len(counts):
            reason = next(iter(unreadable.values()))
            raise UserError(
                f"--ade20k: {label}: expected pictures that can be scored, got none of "
                f"{len(places)}; the first: {reason}. Repair them, or give another folder."
            )
        first = counts if first is None else first
        lines.append(line_of(label, config, counts, first, len(unreadable)))
        rows.append(mine.assign(model=label))
        table = pd.DataFrame(lines)
        text = markdown(table)
        tables = {"per_picture.csv": pd.concat(rows), "segmentation.csv": table}
        write_report(arguments.out, tables, "segmentation.md", text)
    return Outcome(text, failed, table.to_dict("records"))


@torch.no_grad()
def _answers(
    network: SegmentationNetwork,
    config: TrainingConfig,
    pairs: Pairs,
    places: Sequence[int],
    bar: Progress,
) -> tuple[pd.DataFrame, Counts, dict[str, str]]:
    """A row for each picture and class that occurs in truth or answer, the counts of all pictures
    (n, 3, K), and why others could not be read, by the picture."""
    shape, prepare, device = config.model, Whole(config), next(network.parameters()).device
    rows: list[tuple[object, ...]] = []
    counts: list[Counts] = []
    unreadable: dict[str, str] = {}
    for place in places:
        name = pairs.pictures[place]
        bar.advance()
        try:
            picture, labels = prepare(*pairs.read(place))
        except ImageError as error:
            unreadable[name] = str(error)
            continue
        answer = predicted(network, picture.to(device), shape.img_size, labels.shape)
        of_picture = areas(answer.cpu(), labels, shape.num_classes).numpy()
        counts.append(of_picture.astype(np.float64))
        for number in np.flatnonzero(of_picture.any(0)):
            rows.append((name, int(number), *of_picture[:, number].tolist()))
    table = pd.DataFrame(rows, columns=["image_id", "class", "right", "truth", "answer"])
    return table, np.array(counts), unreadable


def line_of(
    label: str, config: TrainingConfig, counts: Counts, first: Counts, failed: int
) -> dict[str, object]:
    """A model's line of segmentation.csv from the pixel counts of its pictures.

    first   the counts of the first model: its mIoU is set beside where both are of the same
            pictures with the same classes, and not beside itself
    failed  the number of pictures that could not be read
    """
    paper = counterpart(config, len(counts))
    same = counts.shape == first.shape and np.array_equal(counts[:, 1], first[:, 1])
    line: dict[str, object] = {
        "model": label,
        "head": config.segmentation.head,
        "n": len(counts),
        "failed": failed,
        "classes": int(counts.sum(0)[1].astype(bool).sum()),
        **scored(counts),
    }
    over = scored(counts, first) if same and counts is not first else {}
    for end in ("", "_low", "_high"):
        line[f"miou_over_first{end}"] = over.get(f"miou{end}", math.nan)
    line["paper_row"] = paper.get("model", "")
    return line | {f"paper_{name}": paper.get(name) for name in ("miou", "macc")}


def markdown(table: pd.DataFrame) -> str:
    """The lines as a table with the paper's figures beside ours, and notes below."""
    forms = {**dict.fromkeys(MEASURES, ".1f"), "miou_over_first": "+.1f"}
    rows = []
    for line in table.to_dict("records"):
        n = counted(line["n"], line["failed"], "unreadable")
        scores = [interval_of(line, name, form) for name, form in forms.items()]
        printed = [beside(line[f"paper_{name}"], line[name], ".2f") for name in ("miou", "macc")]
        rows.append([line["model"], line["head"], n, f"{line['classes']}", *scores, *printed])
    return noted_table(HEADS, rows, [*NOTES, *([CAVEAT] if table["paper_row"].any() else [])])
