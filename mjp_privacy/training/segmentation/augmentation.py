"""Pictures and their label maps, changed alike: scaled, cropped and mirrored for training, resized
for sliding windows."""

from __future__ import annotations

import random

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mjp_privacy.training.config import TrainingConfig

TRIES = 10
"""Crops that are drawn until none of the classes has too large a share."""

Box = tuple[int, int]


class Pixels:
    """From an 8-bit picture to the network's input."""

    def __init__(self, config: TrainingConfig) -> None:
        self.mean = torch.tensor(config.model.mean).view(3, 1, 1)
        self.std = torch.tensor(config.model.std).view(3, 1, 1)

    def __call__(self, picture: Image.Image) -> Tensor:
        """(3, h, w), normalised."""
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        return (pixels - self.mean) / self.std


class Whole:
    """A picture whose short side is the network's, and the label map as it is."""

    def __init__(self, config: TrainingConfig) -> None:
        self.side, self.pixels = config.model.img_size, Pixels(config)

    def __call__(
        self, picture: Image.Image, labels: NDArray[np.uint8], seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The picture (3, h, w) and its labels (H, W), which keep their own size."""
        short_side = scaled(picture, self.side, Image.Resampling.BILINEAR)
        return self.pixels(short_side), torch.from_numpy(labels)


class Augmented:
    """A random crop of a randomly enlarged picture, mirrored half of the time."""

    def __init__(self, config: TrainingConfig) -> None:
        self.side, self.pixels = config.model.img_size, Pixels(config)
        self.settings, self.flip = config.segmentation, config.augmentation.flip

    def __call__(
        self, picture: Image.Image, labels: NDArray[np.uint8], seed: int
    ) -> tuple[Tensor, Tensor]:
        """The crop (3, S, S) and its labels (S, S); where the picture ended, both are 0."""
        chance = random.Random(seed)
        short = max(round(self.side * chance.uniform(*self.settings.scales)), 1)
        picture = scaled(picture, short, Image.Resampling.BILINEAR)
        numbers = np.array(scaled(Image.fromarray(labels), short, Image.Resampling.NEAREST))
        for _ in range(TRIES):
            box = self._drawn(picture.size, chance)
            crop = self._of(numbers, box)
            if self._mixed(crop):
                break
        pixels = self._padded(self.pixels(self._cut(picture, box)))
        cropped = self._padded(torch.from_numpy(crop.copy()))
        if self.flip and chance.random() < 0.5:
            return pixels.flip(-1), cropped.flip(-1)
        return pixels, cropped

    def _drawn(self, size: Box, chance: random.Random) -> Box:
        """Left and top of a crop; 0 where the picture is the smaller one."""
        left, top = (chance.randint(0, max(length - self.side, 0)) for length in size)
        return left, top

    def _of(self, numbers: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
        left, top = box
        return numbers[top : top + self.side, left : left + self.side]

    def _cut(self, picture: Image.Image, box: Box) -> Image.Image:
        left, top = box
        right, bottom = min(left + self.side, picture.width), min(top + self.side, picture.height)
        return picture.crop((left, top, right, bottom))

    def _mixed(self, crop: NDArray[np.uint8]) -> bool:
        """Whether no class has too large a share of the labelled pixels."""
        counts = np.bincount(crop.ravel())[1:]
        return bool(counts.sum()) and bool(
            counts.max() <= self.settings.most_of_one_class * counts.sum()
        )

    def _padded(self, crop: Tensor) -> Tensor:
        below, right = (self.side - length for length in crop.shape[-2:])
        return torch.nn.functional.pad(crop, (0, right, 0, below))


def scaled(picture: Image.Image, short: int, way: Image.Resampling) -> Image.Image:
    """The picture with a short side of `short` pixels, its shape kept."""
    factor = short / min(picture.size)
    width, height = (max(round(length * factor), 1) for length in picture.size)
    return picture.resize((width, height), way)
