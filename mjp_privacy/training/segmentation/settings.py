"""The part of a training's config that is of segmentation alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import Share, schema

Head = Literal["linear", "upernet"]
Channels = Annotated[int, Field(strict=True, ge=8, le=2048)]
"""UPerNet has 512; a head of 2048 has about 480 million parameters."""
Scale = Annotated[float, Field(strict=True, ge=0.1, le=10)]
MOST_CLASSES = 255
"""A label map has 8 bits a pixel, and its 0 is no class."""


@schema
class Segmentation:
    """The head, and how pictures and label maps are drawn for it."""

    head: Head = "linear"
    """`linear`: one linear layer on the last tokens. `upernet`: four maps of features become a
    pyramid with UPerNet's pooling on top, as `heads.PyramidHead` says."""
    channels: Channels = 512
    """Of every map in the pyramid."""
    scales: tuple[Scale, Scale] = (0.5, 2.0)
    """A picture's short side becomes img_size times a number between these, then a crop of img_size
    is cut out."""
    most_of_one_class: Share = 0.75
    """A crop whose labelled pixels have a larger share of one class is drawn again, ten times at
    most."""


def check_segmentation(config: Any, where: str) -> None:
    """Raise a UserError where fields of a TrainingConfig do not fit its task."""
    settings: Segmentation = config.segmentation
    if config.task != "segmentation":
        if settings != Segmentation():
            raise UserError(
                f"{where}, segmentation: these fields are read with task: segmentation alone, and "
                "the task is classification. Set the task, or leave them out."
            )
        return
    if config.family == "resnet":
        raise UserError(f"{where}: task segmentation has heads for family vit or swin, got resnet.")
    if settings.head == "upernet" and config.family == "vit" and config.model.depth < 4:
        raise UserError(
            f"{where}: head upernet reads four blocks of a ViT: expected depth 4 or more, got "
            f"{config.model.depth}."
        )
    if settings.scales[0] > settings.scales[1]:
        raise UserError(
            f"{where}, segmentation.scales: expected the smaller one first, got "
            f"{list(settings.scales)}."
        )
    if config.model.num_classes > MOST_CLASSES:
        raise UserError(
            f"{where}, model.num_classes: a label map has 8 bits a pixel: expected at most "
            f"{MOST_CLASSES} classes, got {config.model.num_classes}."
        )
    _check_unshuffled(config, where)


def _check_unshuffled(config: Any, where: str) -> None:
    """Refuse what belongs to classification: MJP enters through the weights alone."""
    if config.jigsaw.shuffle != "none" or config.model.dal != "none":
        raise UserError(
            f"{where}: in task segmentation MJP enters through the weights to start from "
            "(initial), as in the paper, which fine-tunes; expected jigsaw.shuffle: none and "
            f"model.dal: none, got {config.jigsaw.shuffle} and {config.model.dal}."
        )
    augmentation = config.augmentation
    off = (augmentation.mixup, augmentation.cutmix, augmentation.erasing)
    if augmentation.rand_augment is not None or any(off):
        raise UserError(
            f"{where}: task segmentation scales, crops and flips pictures and label maps alike and "
            "has no other augmentation; expected rand_augment: null, mixup: 0, cutmix: 0 and "
            "erasing: 0."
        )
    if config.data.store != "files":
        raise UserError(f"{where}: task segmentation reads files; expected data.store: files.")
