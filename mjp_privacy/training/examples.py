"""Labelled images to train on: found, checked against the model, and in which order they come."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.seeding import torch_generator
from mjp_privacy.data import ImageRecord, ImageSource, open_images
from mjp_privacy.training.config import TrainingConfig

SPLITS = (("train", "training"), ("val", "valid", "validation", "test"))


@dataclass(frozen=True)
class Examples:
    """Opened images with a label each."""

    source: ImageSource
    records: tuple[ImageRecord, ...]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def labels(self) -> list[int]:
        return [int(record.label or 0) for record in self.records]

    def digest(self) -> str:
        """Names and labels, in their order; not the pixels."""
        named = "".join(f"{record.image_id}\0{record.label}\n" for record in self.records)
        return hashlib.sha256(named.encode()).hexdigest()


def find_examples(
    config: TrainingConfig, data: Path, val: Path | None
) -> tuple[Examples, Examples | None]:
    """Training and validation images; ImageNet's layout holds both in one folder."""
    if val is None and (found := _splits(data)):
        data, val = found
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
    """(number,) places of images; with repeats each stands `repeats` times in a row, cut to size.

    Processes take every n-th place, so copies of an image part ways, as with DeiT's sampler.
    """
    order = torch.randperm(number, generator=torch_generator("epoch order", seed, epoch))
    return order.repeat_interleave(repeats)[:number]


def _splits(data: Path) -> tuple[Path, Path] | None:
    """`train` and `val` under `data`, by any of their names."""
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
    found, expected = set(train.labels), config.model.num_classes
    if found and max(found) >= expected:
        raise UserError(
            f"--data holds a label {max(found)}: expected 0 to {expected - 1} for the model's "
            f"{expected} classes. Set model.num_classes to the data's."
        )
    if config.data.all_classes and len(found) != expected:
        missing = sorted(set(range(expected)) - found)
        raise UserError(
            f"--data: expected images of {expected} classes, got {len(found)}; no image has the "
            f"label {_some(missing)} (folders count in sorted order if they hold images). Fill or "
            "add the missing class folders, set model.num_classes, or, to train on a part of the "
            "classes, data.all_classes: false."
        )
    if (
        len(found) != expected
        and train.records[0].label_source == "folder"
        and not numbered(train.records)
    ):
        raise UserError(
            "--data: part of the classes in plain folders would be numbered 0, 1, … anew, which "
            "are other classes to the model. Expected synset folders, folders named by the class "
            "index, or a labels.csv with the header file,label."
        )


def numbered(records: Sequence[ImageRecord]) -> bool:
    """Whether class folders are named by their class index."""
    return all(_class_name(record).isdigit() for record in records)


def _check_same_classes(config: TrainingConfig, train: Examples, val: Examples) -> None:
    if max(val.labels, default=0) >= config.model.num_classes:
        raise UserError(
            f"--val holds a label {max(val.labels)}: expected 0 to {config.model.num_classes - 1}."
        )
    kinds = {example.records[0].label_source for example in (train, val)}
    if kinds != {"folder"}:
        return  # synsets and label files carry the class index themselves
    names = [{r.label: _class_name(r) for r in example.records} for example in (train, val)]
    if wrong := sorted(label for label in names[1] if names[0].get(label) != names[1][label]):  # type: ignore[type-var]
        first = wrong[0]
        raise UserError(
            f"--val names its classes otherwise than --data: class {first} is the folder "
            f"{names[1][first]!r} there and {names[0].get(first)!r} in the training data. Expected "
            "the same class folders in both; add the missing ones (an empty class shifts others)."
        )


def _class_name(record: ImageRecord) -> str:
    return PurePosixPath(record.image_id).parent.name


def _some(numbers: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + (", …" if len(numbers) > most else "")
