"""Labelled training images: finding them, checking them against the model, ordering an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.text import first_of
from mjp_privacy.data import ImageRecord, ImageSource, open_images
from mjp_privacy.data.labels import is_class_index
from mjp_privacy.training.config import TrainingConfig

SPLITS = (("train", "training"), ("val", "valid", "validation", "test"))


@dataclass(frozen=True)
class Examples:
    """Opened images, each with a label."""

    source: ImageSource
    records: tuple[ImageRecord, ...]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def labels(self) -> list[int]:
        """The class index of every image, in the order of the records."""
        return [int(record.label or 0) for record in self.records]

    def digest(self) -> str:
        """SHA-256 of all names and labels in order; pixels do not enter it."""
        named = "".join(f"{record.image_id}\0{record.label}\n" for record in self.records)
        return hashlib.sha256(named.encode()).hexdigest()


def find_examples(
    config: TrainingConfig, data: Path, val: Path | None
) -> tuple[Examples, Examples | None]:
    """Training images, and validation images if there are any.

    Without `val` they are looked for in `data`, which holds both in ImageNet's layout.
    """
    if val is None and (splits := splits_under(data)):
        data, val = splits
    train = _opened(data, "--data")
    held_out = None if val is None else _opened(val, "--val")
    _check_classes(config, train)
    if held_out is not None:
        _check_same_classes(config, train, held_out)
    if len(train) < config.recipe.batch:
        raise UserError(
            f"--data: expected at least one batch of {config.recipe.batch} images, got "
            f"{len(train)}. Give --batch {max(len(train), 1)} or less."
        )
    return train, held_out


def epoch_order(seed: int, epoch: int, number: int, repeats: int) -> torch.Tensor:
    """(number,) indices of images in the random order of an epoch.

    With repeats, each index stands `repeats` times in a row, and the list is cut to `number`.
    Processes take every n-th entry, so that the copies of an image go to different processes, as
    with DeiT's sampler.
    """
    order = torch.randperm(number, generator=torch_generator("epoch order", seed, epoch))
    return order.repeat_interleave(repeats)[:number]


def splits_under(data: Path) -> tuple[Path, Path] | None:
    """The folders of training and validation images under `data`, by any of their usual names."""
    parts = [next((data / n for n in names if (data / n).is_dir()), None) for names in SPLITS]
    return (parts[0], parts[1]) if parts[0] and parts[1] else None


def _opened(path: Path, option: str) -> Examples:
    source = open_images(path)
    if any(record.label is None for record in source.records):
        raise UserError(
            f"{option} {path}: expected images with labels (class folders, ImageNet's layout, or "
            "labels.csv), got images without. Put each class into a folder of its own."
        )
    return Examples(source, source.records)


def _check_classes(config: TrainingConfig, train: Examples) -> None:
    labels, expected = set(train.labels), config.model.num_classes
    if labels and max(labels) >= expected:
        raise UserError(
            f"--data holds a label {max(labels)}: expected 0 to {expected - 1} for the model's "
            f"{expected} classes. Set model.num_classes to the data's."
        )
    if config.data.all_classes and len(labels) != expected:
        missing = sorted(set(range(expected)) - labels)
        raise UserError(
            f"--data: expected images of {expected} classes, got {len(labels)}; no image has the "
            f"label {first_of(missing, 8)} (folders that hold images are numbered in sorted "
            "order). Fill or add the missing class folders, set model.num_classes, or, to train on "
            "some of the classes only, data.all_classes: false."
        )
    if (
        len(labels) != expected
        and train.records[0].label_source == "folder"
        and not numbered(train.records)
    ):
        raise UserError(
            "--data: plain folders of only some classes would be numbered 0, 1, … anew, and these "
            "numbers mean other classes to the model. Expected synset folders, folders named by "
            "the class index (7, not 007), or a labels.csv with the header file,label."
        )


def numbered(records: Sequence[ImageRecord]) -> bool:
    """Whether all class folders are named by their class index, such as `7` but not `07`."""
    return all(is_class_index(_class_name(record)) for record in records)


def _check_same_classes(config: TrainingConfig, train: Examples, val: Examples) -> None:
    if max(val.labels, default=0) >= config.model.num_classes:
        raise UserError(
            f"--val holds a label {max(val.labels)}: expected 0 to {config.model.num_classes - 1}."
        )
    kinds = {example.records[0].label_source for example in (train, val)}
    if kinds != {"folder"}:
        return  # synsets and label files state the class index themselves
    names = [{r.label: _class_name(r) for r in example.records} for example in (train, val)]
    if wrong := sorted(label for label in names[1] if names[0].get(label) != names[1][label]):  # type: ignore[type-var]
        first = wrong[0]
        raise UserError(
            f"--val and --data number their class folders differently: class {first} is the folder "
            f"{names[1][first]!r} there and {names[0].get(first)!r} in the training data. Expected "
            "the same class folders in both; add the missing ones (one that holds no image is not "
            "numbered, which shifts all later ones)."
        )


def _class_name(record: ImageRecord) -> str:
    return PurePosixPath(record.image_id).parent.name
