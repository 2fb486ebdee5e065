"""Batches of large images: decoded and augmented one by one with timm, in worker processes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from timm.data import create_transform
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError, Preprocessing
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.examples import Examples
from mjp_privacy.training.loaded_batches import LoadedBatches
from mjp_privacy.training.processes import World


class _Images:
    """The `loaded_batches.Items` of labelled images."""

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

    def __len__(self) -> int:
        return len(self.examples)


class FileBatches(LoadedBatches):
    """The `Batches` of images that are decoded from their files each time they are needed."""

    def __init__(
        self, config: TrainingConfig, examples: Examples, world: World, workers: int
    ) -> None:
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
        training, plain = _Images(examples, augmented), _Images(examples, _Plain(config))
        super().__init__(config, training, plain, world, workers)


class _Plain:
    """Resize, centre crop and normalise; a class, because workers need it pickled."""

    def __init__(self, config: TrainingConfig) -> None:
        self.preprocessing = Preprocessing(config.model.img_size)
        self.mean = torch.tensor(config.model.mean).view(3, 1, 1)
        self.std = torch.tensor(config.model.std).view(3, 1, 1)

    def __call__(self, picture: Any) -> Tensor:
        return (self.preprocessing(picture) - self.mean) / self.std
