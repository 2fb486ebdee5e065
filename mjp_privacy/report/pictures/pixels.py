"""Stored tensors as pictures, and how scores and names stand beside them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.metrics.statistics import PSNR_CAP

Picture = NDArray[np.float32]


def picture(image: Tensor) -> Picture:
    """(C, H, W) of any float type to (H, W, 3) in [0, 1]; NaN becomes grey."""
    array = np.nan_to_num(image.float().numpy(), nan=0.5, posinf=1.0, neginf=0.0)
    array = np.clip(array, 0.0, 1.0).transpose(1, 2, 0)
    return np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array


def psnr_text(psnr: float, *, exact: bool = False) -> str:
    """PSNR in words, capped as in tables: beyond 100 dB differences are rounding, not visible.

    exact: whether the picture equals the original in every 8-bit value
    """
    if exact or math.isinf(psnr):
        return "exact"
    return f">{PSNR_CAP:.0f} dB" if psnr > PSNR_CAP else f"{psnr:.1f} dB"


def shorten(text: str, length: int) -> str:
    """At most `length` characters; the middle is cut, since image names differ at the end."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def one_line(text: str) -> str:
    """The text on one line, without characters that steer a terminal: those become spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
