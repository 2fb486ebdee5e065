"""Batches of small images: decoded once, kept as bytes on the device, augmented batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.progress import Progress
from mjp_privacy.data import ImageError, Preprocessing
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.examples import Examples, epoch_order
from mjp_privacy.training.loaded_batches import unreadable
from mjp_privacy.training.processes import World


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
    """The `Batches` of images that are kept in memory."""

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
        """The batches from `first` up to `steps` of an epoch, in its random order, augmented."""
        batch, seed = self.config.recipe.batch, self.config.seed
        order = epoch_order(seed, epoch, len(self.labels), self.config.augmentation.repeats)
        order = order.to(self.world.device)
        part = self.world.part(batch)
        for number in range(first, steps):
            chosen = order[number * batch : (number + 1) * batch][part]
            images = self._augmented(self.images[chosen], epoch * steps + number, part)
            yield self.prepared(images), self.labels[chosen]

    def in_order(self, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of all images, once and not augmented, for validation."""
        mine = torch.arange(self.world.rank, len(self.labels), self.world.size)
        for chosen in mine.split(batch):
            place = chosen.to(self.world.device)
            yield self.prepared(self.images[place]), self.labels[place]

    def prepared(self, images: Tensor) -> Tensor:
        """Stored images (uint8) -> normalised images at the model's input size."""
        size = self.config.model.img_size
        pixels = images.float() / 255
        if images.shape[-1] != size:
            pixels = F.interpolate(pixels, size=size, mode="bicubic", antialias=True).clamp(0, 1)
        return (pixels - self.mean) / self.std

    def _augmented(self, images: Tensor, step: int, part: slice) -> Tensor:
        """Random crops after zero padding, and flips.

        They are drawn for the whole global batch on the host, so that they do not depend on the
        number of processes or the device.
        """
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
