"""Scores that compare pixel with pixel, and the 8-bit levels that image files hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mjp_privacy.metrics.contract import Prepared


def levels(images: Tensor) -> Tensor:
    """(m, C, H, W) in [0, 1] -> float64 of 0 to 255, as an image file holds them."""
    return (images.double().clamp(0, 1) * 255).round_()


def quantise(images: Tensor) -> Tensor:
    """(m, C, H, W) -> float64 in [0, 1] on the levels k / 255, as saved to a file and read back."""
    return levels(images).div_(255)


def mse(reconstructions: Tensor, references: Tensor) -> Tensor:
    """Mean of (u - v)^2 over channels and pixels. (m, C, H, W) twice -> (m,) float64 in [0, 1]."""
    difference = (reconstructions.double() - references.double()).flatten(1)
    return overlap(difference, difference) / difference.shape[1]


def psnr(reconstructions: Tensor, references: Tensor) -> Tensor:
    """10 log10(1 / MSE) in dB, peak 1; inf where the images are identical. -> (m,) float64."""
    return decibels(mse(reconstructions, references))


def decibels(errors: Tensor) -> Tensor:
    """PSNR from mean squared errors."""
    return 0.0 - 10 * errors.log10()  # 0 - x, so that MSE 1 is 0, not -0


def overlap(left: Tensor, right: Tensor) -> Tensor:
    """Sum of the products of corresponding pixels; (m, ...) twice -> (m,)."""
    return torch.bmm(left.flatten(1).unsqueeze(1), right.flatten(1).unsqueeze(2)).flatten()


@dataclass(frozen=True)
class SquaredError:
    """The mean squared error as a measure: MSE, and PSNR after `decibels`."""

    precision: ClassVar[torch.dtype] = torch.float64

    def prepare(self, references: Tensor) -> Prepared:
        """Nothing."""
        return ()

    def compare(self, reconstructions: Tensor, references: Tensor, prepared: Prepared) -> Tensor:
        """`mse`."""
        return mse(reconstructions, references)
