"""Batches of large images: decoded and augmented one by one with timm, in worker processes.

Every image is seeded by (seed, epoch, place in the epoch), so an epoch is the same with any number
of workers, and a run can continue in the middle of one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.seeding import derive_seed
from mjp_privacy.data import ImageError, Preprocessing
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.examples import Examples, epoch_order
from mjp_privacy.training.processes import World


class _Images(Dataset[tuple[Tensor, int] | ImageError]):
    """Images indexed by (index of the record, seed of the augmentation).

    For an unreadable image the error is returned: raised in a worker, it would lose its message.
    """

    def __init__(self, examples: Examples, transform: Any) -> None:
        self.examples, self.transform = examples, transform

    def __getitem__(self, index: tuple[int, int]) -> tuple[Tensor, int] | ImageError:
        place, seed = index
        record = self.examples.records[place]
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  (timm's augmentation draws from it)
        torch.manual_seed(seed)
        try:
            return self.transform(self.examples.source.decode(record)), int(record.label or 0)
        except ImageError as error:
            return error


def _collated(items: list[tuple[Tensor, int] | ImageError]) -> Any:
    """A batch, or the first error among its images."""
    error = next((item for item in items if isinstance(item, ImageError)), None)
    return default_collate(items) if error is None else error


class FileBatches:
    """The `Batches` of images that are decoded from their files each time they are needed."""

    def __init__(
        self, config: TrainingConfig, examples: Examples, world: World, workers: int
    ) -> None:
        self.config, self.world, self.workers = config, world, workers
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
        self.training = _Images(examples, augmented)
        self.plain = _Images(examples, _Plain(config))

    def epoch(self, epoch: int, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from `first` up to `steps` of an epoch, in its random order, augmented."""
        batch, seed = self.config.recipe.batch, self.config.seed
        number = len(self.training.examples)
        order = epoch_order(seed, epoch, number, self.config.augmentation.repeats).tolist()
        part = self.world.part(batch)
        batches = []
        for start in range(first * batch, steps * batch, batch):
            places = range(start, start + batch)[part]
            batches.append([(order[p], derive_seed("image", seed, epoch, p)) for p in places])
        yield from self._load(self.training, batches)

    def in_order(self, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of all images, once and not augmented, for validation."""
        mine = [(p, 0) for p in range(self.world.rank, len(self.plain.examples), self.world.size)]
        yield from self._load(self.plain, [mine[i : i + batch] for i in range(0, len(mine), batch)])

    def _load(
        self, images: _Images, batches: Sequence[Sequence[tuple[int, int]]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.world.device
        loader = DataLoader(
            images,
            batch_sampler=batches,  # type: ignore[arg-type]
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
            collate_fn=_collated,
        )
        for batch in loader:
            if isinstance(batch, ImageError):
                raise UserError(
                    f"Image {batch}. Expected every training image to be readable; repair it or "
                    "take it out and start in another --out (the order of images changes)."
                )
            pixels, labels = batch
            yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)


class _Plain:
    """Resize, centre crop and normalise; a class, because workers need it pickled."""

    def __init__(self, config: TrainingConfig) -> None:
        self.preprocessing = Preprocessing(config.model.img_size)
        self.mean = torch.tensor(config.model.mean).view(3, 1, 1)
        self.std = torch.tensor(config.model.std).view(3, 1, 1)

    def __call__(self, picture: Any) -> Tensor:
        return (self.preprocessing(picture) - self.mean) / self.std
