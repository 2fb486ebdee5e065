"""Which images stand for a line, and their tensors: quantiles of PSNR, never picked by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.loading import Line

QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)

KINDS = {"plain": "original", "input": "shuffled input", "images": "reconstruction"}
"""The stored tensors that are shown, in this order, and what they are called."""

Picture = NDArray[np.float32]


@dataclass(frozen=True)
class Example:
    """One image of a line: (H, W, 3) pictures in [0, 1] by kind."""

    image_id: str
    quantiles: tuple[float, ...]  # the quantiles it stands for; several where n is small
    psnr: float
    pictures: dict[str, Picture]
    against: str  # what it was scored against

    @property
    def title(self) -> str:
        """Its quantiles, PSNR and image id, in two lines."""
        percent = ", ".join(f"{100 * quantile:.0f}" for quantile in self.quantiles)
        return f"{percent} %: {psnr_text(self.psnr)}\n{shorten(self.image_id, 23)}"


def choose(line: Line, quantiles: Sequence[float] = QUANTILES) -> list[tuple[str, list[float]]]:
    """The images at the quantiles of standard PSNR, as (image_id, the quantiles it stands for).

    Equal scores are ordered by image_id.
    """
    scores = line.scored("psnr", "standard")
    ranked = sorted(scores.items(), key=lambda item: (item[1], str(item[0])))
    chosen: dict[str, list[float]] = {}
    for quantile in quantiles if ranked else ():
        image_id = str(ranked[math.floor(quantile * (len(ranked) - 1) + 0.5)][0])
        chosen.setdefault(image_id, []).append(quantile)
    return list(chosen.items())


def examples(line: Line, quantiles: Sequence[float] = QUANTILES) -> list[Example]:
    """The chosen images whose reconstructions are stored."""
    scores = line.scored("psnr", "standard")
    chosen = []
    for image_id, stands_for in choose(line, quantiles):
        tensors = line.reconstruction(image_id)
        if tensors is None:
            continue
        pictures = {kind: picture(tensors[kind]) for kind in KINDS if kind in tensors}
        psnr = float(scores[image_id])
        chosen.append(Example(image_id, tuple(stands_for), psnr, pictures, _against(tensors)))
    return chosen


def _against(tensors: Mapping[str, Tensor]) -> str:
    """Which stored image the target is equal to, in words."""
    for kind in ("plain", "input"):
        if {kind, "target"} <= tensors.keys() and tensors[kind].equal(tensors["target"]):
            return f"the {KINDS[kind]}"
    return "the setting's own target"


def shown_kinds(shown: Sequence[Example]) -> list[str]:
    """The kinds every example has; the input only where it differs from the plain image."""
    kinds = [kind for kind in KINDS if all(kind in example.pictures for example in shown)]
    if {"plain", "input"} <= set(kinds) and all(
        np.array_equal(example.pictures["plain"], example.pictures["input"]) for example in shown
    ):
        kinds.remove("input")
    return kinds


def picture(image: Tensor) -> Picture:
    """(C, H, W) of any float type to (H, W, 3) in [0, 1]; NaN becomes grey."""
    array = np.nan_to_num(image.float().numpy(), nan=0.5, posinf=1.0, neginf=0.0)
    array = np.clip(array, 0.0, 1.0).transpose(1, 2, 0)
    return np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array


def psnr_text(psnr: float) -> str:
    """PSNR in words, capped as in tables: beyond 100 dB differences are rounding, not visible."""
    if math.isinf(psnr):
        return "exact"
    return f">{PSNR_CAP:.0f} dB" if psnr > PSNR_CAP else f"{psnr:.1f} dB"


def attack_text(line: Line, length: int) -> str:
    """The attack's label, shortened to `length` characters; controls are marked as such."""
    name = shorten(line.cell.attack.title, length)
    return f"control: {name}" if line.role in ("floor", "ceiling") else name


def shorten(text: str, length: int) -> str:
    """At most `length` characters; the middle is cut, since image names differ at the end."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def file_name(line: Line) -> str:
    """The file name of a line's strip: safe on every file system, unique by the line's number."""
    cell = line.cell
    parts = (cell.model.label, cell.setting, cell.attack.title, cell.dtype)
    slug = re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(map(str, parts))).strip("._-")[:80]
    return f"line_{line.number:03d}_{slug}.png"
