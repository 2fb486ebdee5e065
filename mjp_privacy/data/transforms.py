"""From a picture to the model's input pixels; normalisation is left to the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name

Interpolation = Literal["bicubic", "bilinear"]

_FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
}


@dataclass(frozen=True)
class Preprocessing:
    """Short side to `resize` pixels, then the central square of side `size`; or, with `squash`, the
    whole picture to size × size, whatever its shape.

    The same as torchvision's Resize and CenterCrop on a PIL image. A picture that already is
    size × size is not changed, so that images made for the model reach it bit for bit.

        Preprocessing(224)(picture)  # (3, 224, 224) float32 in [0, 1]
    """

    size: int
    resize: int | None = None  # None: round(size · 248 / 224)
    interpolation: Interpolation = "bicubic"
    squash: bool = False

    @classmethod
    def robustness_sets(cls, size: int) -> Preprocessing:
        """As the official scripts of ImageNet-C, -A and -O cut a photograph: short side 256 for a
        side of 224, bilinear."""
        return cls(size, round(size * 256 / 224), "bilinear")

    def __post_init__(self) -> None:
        if self.interpolation not in get_args(Interpolation):
            raise unknown_name("interpolation", self.interpolation, list(_FILTERS))
        if self.size < 1 or self.short_side < self.size:
            raise UserError(
                "Expected 1 ≤ size ≤ resize: the crop is taken from the resized picture; got "
                f"size {self.size} and resize {self.short_side}."
            )

    @property
    def short_side(self) -> int:
        """The short side before the crop, in pixels."""
        return round(self.size * 248 / 224) if self.resize is None else self.resize

    def __call__(self, picture: Image.Image) -> Tensor:
        """An RGB picture to (3, size, size) float32 in [0, 1]: its 8-bit values over 255."""
        if picture.size != (self.size, self.size):
            picture = self._squashed(picture) if self.squash else self._crop(self._resize(picture))
        pixels = np.array(picture.convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32) / 255

    def _squashed(self, picture: Image.Image) -> Image.Image:
        return picture.resize((self.size, self.size), _FILTERS[self.interpolation])

    def _resize(self, picture: Image.Image) -> Image.Image:
        width, height = picture.size
        short = min(width, height)
        sides = (int(self.short_side * width / short), int(self.short_side * height / short))
        return picture.resize(sides, _FILTERS[self.interpolation])

    def _crop(self, picture: Image.Image) -> Image.Image:
        left = round((picture.width - self.size) / 2)
        top = round((picture.height - self.size) / 2)
        return picture.crop((left, top, left + self.size, top + self.size))
