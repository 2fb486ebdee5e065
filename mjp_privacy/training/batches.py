"""Labelled training images: found, checked against the model, ordered, shared out to the processes
that train, decoded and augmented."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import commonpath
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from timm.data import create_transform
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import Compose, Normalize

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed, torch_generator
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.text import first_of
from mjp_privacy.data import (
    ImageError,
    ImageRecord,
    ImageSource,
    Preprocessing,
    open_images,
    spread_subset,
)
from mjp_privacy.data.labels import is_class_index
from mjp_privacy.training.config import TrainingConfig

# one process among all ----------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """This process among all: its number `rank` of `size`, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def part(self, batch: int) -> slice:
        """This process's images of a global batch: every size-th one, so that the copies of
        repeated augmentation go to different processes, as with DeiT's sampler."""
        return slice(self.rank, batch, self.size)

    def mean(self, numbers: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(numbers)
            numbers = numbers / self.size
        return numbers

    def agreed(self, yes: bool) -> bool:
        """The first process's answer for all, because the processes' clocks differ."""
        if self.size == 1:
            return yes
        answer = torch.tensor(float(yes), device=self.device)
        dist.broadcast(answer, 0)
        return bool(answer)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


# found and checked --------------------------------------------------------------------------------


class Batches(Protocol):
    """This process's normalised images (b, C, H, W) and labels (b,), or label maps (b, H, W)."""

    def epoch(self, epoch: int, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from `first` up to `steps` of an epoch, in its random order, augmented."""

    def in_order(self, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of all images, once and not augmented, for validation."""


SPLITS = (("train", "training"), ("val", "valid", "validation", "test"))
"""The usual names of folders of training and of validation images."""


@dataclass(frozen=True)
class Examples:
    """Opened images, each with a label."""

    source: ImageSource
    records: tuple[ImageRecord, ...]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def labels(self) -> list[int]:
        return [int(record.label or 0) for record in self.records]

    def drawn(self, limit: int | None, seed: int) -> Examples:
        """So many of them, drawn by the seed and spread over the classes; None: all."""
        if limit is None:
            return self
        return Examples(self.source, tuple(spread_subset(self.records, limit, seed)))

    def changed(self, transform: Any, place: int, seed: int) -> tuple[Tensor, int]:
        """A picture as a transform makes it, with its label."""
        record = self.records[place]
        seed_libraries(seed)  # timm's augmentation draws from them
        return transform(self.source.decode(record)), int(record.label or 0)

    def digest(self) -> str:
        """SHA-256 of all names and labels in order; pixels do not enter it."""
        named = "".join(f"{record.image_id}\0{record.label}\n" for record in self.records)
        return hashlib.sha256(named.encode()).hexdigest()


def find_examples(
    config: TrainingConfig, data: Path, val: Path | None
) -> tuple[Examples, Examples | None]:
    """Training images, and validation images if there are any: in `val`, or beside the others in
    ImageNet's layout."""
    if val is None:
        parts = [next((data / n for n in names if (data / n).is_dir()), None) for names in SPLITS]
        if parts[0] and parts[1]:
            data, val = parts[0], parts[1]
    if val is not None and val.resolve() == data.resolve():
        raise UserError(
            f"--val: expected other images than --data, got the same {val}: their accuracy would "
            "be that of training images. Leave --val out, or give images that are not trained on."
        )
    train = _opened(data, "--data")
    held_out = None if val is None else _opened(val, "--val")
    expected = config.model.num_classes
    missing = sorted(set(range(expected)) - set(train.labels))
    if config.data.all_classes and missing:
        raise UserError(
            f"--data: expected images of {expected} classes; no image has the label "
            f"{first_of(missing, 8)}. {train.source.labels_described} Add images of these classes, "
            "or set model.num_classes or data.all_classes: false."
        )
    check_labels(train.records, expected, "--data", "the model")
    if held_out is not None:
        known = class_folders(train.records)
        for label, name in class_folders(held_out.records).items() if known else ():
            if name != known.get(label):
                raise UserError(
                    f"Expected the same class folders in --val and --data; class {label} is "
                    f"{name!r} there and {known.get(label)!r} in the training data. A folder "
                    "without images is not numbered."
                )
        check_labels(held_out.records, expected, "--val", "the model", partial=True)
    if len(train) < config.recipe.batch:
        raise UserError(
            f"--data: expected at least one batch of {config.recipe.batch} images, got "
            f"{len(train)}. Give --batch {max(len(train), 1)} or less."
        )
    return train, held_out


def epoch_order(seed: int, epoch: int, number: int, repeats: int) -> torch.Tensor:
    """(number,) indices of images in the random order of an epoch.

    With repeats, each index stands `repeats` times in a row, and the list is cut to `number`.
    """
    order = torch.randperm(number, generator=torch_generator("epoch order", seed, epoch))
    return order.repeat_interleave(repeats)[:number]


def _opened(path: Path, option: str) -> Examples:
    source = open_images(path)
    if any(record.label is None for record in source.records):
        raise UserError(
            f"{option} {path}: expected images with labels (class folders, ImageNet's layout, or "
            "labels.csv), got images without. Put each class into a folder of its own."
        )
    return Examples(source, source.records)


def check_labels(
    records: Sequence[ImageRecord], classes: int, option: str, owner: str, *, partial: bool = False
) -> None:
    """Raise if the images' labels are not the class indices of their owner, a model with so many
    classes; partial: some of the classes may be missing, whatever their folders are called."""
    labels = {record.label for record in records if record.label is not None}
    if max(labels, default=0) >= classes:
        raise UserError(
            f"{option} holds a label {max(labels)}, but {owner} has {classes} classes. "
            f"Expected labels below {classes}: other images, or a model of more classes."
        )
    folders = class_folders(records)
    numbered = all(map(is_class_index, folders.values()))
    if not numbered and len(labels) != classes and not partial:
        raise UserError(
            f"{option} has {len(labels)} class folders, but {owner} has {classes} classes, and "
            "folders are numbered in sorted order. Expected all of them, synset folders, folders "
            "named by the class index (7, not 007), or a labels.csv with the header file,label."
        )


def class_folders(records: Sequence[ImageRecord]) -> dict[int | None, str]:
    """The folder that each label stands for, below those around all images; none where labels come
    from elsewhere."""
    labels = {r.image_id: r.label for r in records if r.label_source == "folder"}
    around = len(PurePosixPath(commonpath([*labels] or [""])).parts)
    return {label: PurePosixPath(name).parts[around] for name, label in labels.items()}


# decoded each time --------------------------------------------------------------------------------


def unreadable(error: ImageError, used_for: str) -> UserError:
    return UserError(
        f"Image {error}. Expected every {used_for} image to be readable: repair it, and the same "
        "command goes on; or take it out and, where steps were trained, give another --out."
    )


@dataclass(frozen=True)
class Items:
    """Images as a transform makes them, each by its place and the seed of its augmentation.

    For an unreadable one the error is returned: raised in a worker, it would lose its message.
    """

    images: Any
    transform: Any

    def __getitem__(self, index: tuple[int, int]) -> tuple[Tensor, Any] | ImageError:
        try:
            return self.images.changed(self.transform, *index)
        except ImageError as error:
            return error


def collated(items: list[Any]) -> Any:
    error = next((item for item in items if isinstance(item, ImageError)), None)
    return default_collate(items) if error is None else error


@dataclass(frozen=True)
class LoadedBatches:
    """`Batches` that are decoded by worker processes each time they are needed. Every image is
    seeded by (seed, epoch, place in the epoch): an epoch is the same with any number of workers.

    images     `Examples`, or what has their length and `changed`
    augmented  the transform that they are trained with
    plain      the one that they are validated with
    """

    config: TrainingConfig
    images: Any
    augmented: Any
    plain: Any
    world: World
    workers: int

    def epoch(self, epoch: int, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        batch, seed = self.config.recipe.batch, self.config.seed
        repeats = self.config.augmentation.repeats
        order = epoch_order(seed, epoch, len(self.images), repeats).tolist()
        part = self.world.part(batch)
        batches = []
        for start in range(first * batch, steps * batch, batch):
            places = range(start, start + batch)[part]
            batches.append([(order[p], derive_seed("image", seed, epoch, p)) for p in places])
        return self._load(self.augmented, batches, "training")

    def in_order(self, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        mine = [(p, 0) for p in range(self.world.rank, len(self.images), self.world.size)]
        batches = [mine[i : i + batch] for i in range(0, len(mine), batch)]
        return self._load(self.plain, batches, "validation")

    def _load(
        self, transform: Any, batches: Sequence[Sequence[tuple[int, int]]], used_for: str
    ) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.world.device
        loader: Any = DataLoader(
            Items(self.images, transform),  # type: ignore[arg-type]
            batch_sampler=batches,  # type: ignore[arg-type]
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
            collate_fn=collated,
        )
        for batch in loader:
            if isinstance(batch, ImageError):
                raise unreadable(batch, used_for)
            pixels, labels = batch
            yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def seed_libraries(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


# small images, kept in memory ---------------------------------------------------------------------


def decode_all(examples: Examples, side: int, used_for: str = "training") -> Tensor:
    """Decode all images: (n, 3, side, side) uint8 in the order of the records."""
    preprocessing = Preprocessing(side, side)
    images = torch.empty(len(examples), 3, side, side, dtype=torch.uint8)
    with Progress("decoding", lambda: len(examples), "images") as bar:
        for place, record in enumerate(examples.records):
            try:
                pixels = preprocessing(examples.source.decode(record))
            except ImageError as error:
                raise unreadable(error, used_for) from error
            images[place] = (pixels * 255).round().to(torch.uint8)
            bar.advance()
    return images


class MemoryBatches:
    def __init__(
        self,
        config: TrainingConfig,
        examples: Examples,
        world: World,
        used_for: str = "training",
    ) -> None:
        self.config, self.world = config, world
        side = config.data.native_size or config.model.img_size
        self.images = decode_all(examples, side, used_for).to(world.device)
        self.labels = torch.tensor(examples.labels, device=world.device)
        shape = config.model
        self.mean = torch.tensor(shape.mean, device=world.device).view(3, 1, 1)
        self.std = torch.tensor(shape.std, device=world.device).view(3, 1, 1)

    def epoch(self, epoch: int, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        batch, seed = self.config.recipe.batch, self.config.seed
        order = epoch_order(seed, epoch, len(self.labels), self.config.augmentation.repeats)
        order = order.to(self.world.device)
        part = self.world.part(batch)
        for number in range(first, steps):
            chosen = order[number * batch : (number + 1) * batch][part]
            images = self._augmented(self.images[chosen], epoch * steps + number, part)
            yield self.prepared(images), self.labels[chosen]

    def in_order(self, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        mine = range(self.world.rank, len(self.labels), self.world.size)
        for start in range(0, len(mine), batch):
            place = torch.tensor(mine[start : start + batch], device=self.world.device)
            yield self.prepared(self.images[place]), self.labels[place]

    def prepared(self, images: Tensor) -> Tensor:
        """Stored images (uint8) -> normalised images at the model's input size."""
        size = self.config.model.img_size
        pixels = images.float() / 255
        if images.shape[-1] != size:
            pixels = F.interpolate(pixels, size=size, mode="bicubic", antialias=True).clamp(0, 1)
        return (pixels - self.mean) / self.std

    def _augmented(self, images: Tensor, step: int, part: slice) -> Tensor:
        """Random crops after zero padding, and flips, drawn on the host for the whole global batch:
        the number of processes and the device change none."""
        augmentation, number = self.config.augmentation, self.config.recipe.batch
        generator = torch_generator("augmentation", self.config.seed, step)
        padding, side = augmentation.crop_padding, images.shape[-1]
        offsets = torch.randint(0, 2 * padding + 1, (2, number, 1), generator=generator)
        flips = torch.rand(number, generator=generator)[part] < 0.5 * augmentation.flip
        line = torch.arange(side)
        rows, columns = (offsets[:, part] + line).to(images.device, non_blocking=True)
        flipped = flips[:, None].to(images.device, non_blocking=True)
        columns = torch.where(flipped, columns.flip(-1), columns)
        padded = F.pad(images, (padding,) * 4)
        place = torch.arange(len(images), device=images.device)[:, None, None, None]
        channel = torch.arange(3, device=images.device)[:, None, None]
        return padded[place, channel, rows[:, None, :, None], columns[:, None, None, :]]


def make_batches(
    config: TrainingConfig,
    examples: Examples,
    world: World,
    workers: int,
    used_for: str = "training",
) -> Batches:
    """Batches of these images, from memory or decoded from their files each time, as the config
    says."""
    if config.data.store == "memory":
        return MemoryBatches(config, examples, world, used_for)
    shape, augmentation = config.model, config.augmentation
    try:
        augmented = create_transform(
            shape.img_size,
            is_training=True,
            auto_augment=augmentation.rand_augment,
            re_prob=augmentation.erasing,
            re_mode="pixel",
            hflip=0.5 * augmentation.flip,
            interpolation="bicubic",
            mean=shape.mean,
            std=shape.std,
        )
    except (AssertionError, ValueError, KeyError) as error:
        raise UserError(
            f"augmentation.rand_augment: expected one that timm knows, such as "
            f"rand-m9-mstd0.5-inc1, or null; got {augmentation.rand_augment!r}."
        ) from error
    plain = Compose([Preprocessing(shape.img_size), Normalize(shape.mean, shape.std)])
    return LoadedBatches(config, examples, augmented, plain, world, workers)
