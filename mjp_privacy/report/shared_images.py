"""Scores of the same images side by side: of two lines, or of two metrics of one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mjp_privacy.report.line import Line
from mjp_privacy.report.scores import Key

PSNR: Key = ("psnr", "standard")


class SharedScores(NamedTuple):
    """Scores of the images that both have, in the order of their ids."""

    at: NDArray[np.int32]  # places among the first line's images
    first: NDArray[np.float64]
    second: NDArray[np.float64]


def shared_scores(
    first: Line, second: Line, first_key: Key = PSNR, second_key: Key = PSNR
) -> SharedScores:
    """The images that both lines scored.

    shared_scores(april, ours).first.mean()     # April's PSNR where ours was scored too
    """
    sides = (first.column(*first_key), second.column(*second_key))
    mine, its = (side if side.scored.all() else side.chosen(side.scored) for side in sides)
    places = its.at
    if second.images is not first.images:
        places = first.images.places(second.images.ids)[its.at]
        its, places = its.chosen(places >= 0), places[places >= 0]
    if np.array_equal(mine.at, places):
        return SharedScores(mine.at, mine.values, its.values)
    at, here, there = np.intersect1d(mine.at, places, assume_unique=True, return_indices=True)
    return SharedScores(at, mine.values[here], its.values[there])
