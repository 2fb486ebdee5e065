"""How well a linear map reads a patch's place off its position embedding: the paper's Table 8.

As the authors' script does it (`pestudy/absolute.py`): linear regression with an intercept, five
folds over the patches in random order, mean absolute error on the patches left out. Where an
embedding has more numbers than there are patches, the regression is the one of least norm. The
place is the number of the patch from 0 to N-1 (1D), or its row and its column from 0 to G-1 (2D,
the mean over both), not scaled. That this is the unit of Table 8 follows from its figures: a 1D
error of .945 is 14 times .0675, beside a 2D error of .076.

Table 8's ± is not explained. Here it is the standard deviation over draws of the folds: relative to
the mean it is 4.5 % in 1D and 1.6 % in 2D for a ViT-Ti, and 2 to 5 % in Table 8's rows; over the
five folds it would be 11 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mjp_privacy.analysis.position_table import Matrix, PositionTable
from mjp_privacy.core.machine import derive_seed

FOLDS = 5
REPEATS = 10
"""Draws of the folds."""


@dataclass(frozen=True)
class PlaceError:
    """Mean absolute errors in patches, with the standard deviation over draws of the folds (NaN of
    a single draw).

    constant_1d, constant_2d: errors of the best guess without an embedding, the middle.
    """

    mae_1d: float
    std_1d: float
    mae_2d: float
    std_2d: float
    constant_1d: float
    constant_2d: float


def place_error(table: PositionTable, *, seed: int = 0, repeats: int = REPEATS) -> PlaceError:
    """The errors of a table's places: place_error(table).mae_2d is 0 for an exact linear map."""
    errors = np.stack([_left_out_errors(table, seed, draw) for draw in range(repeats)])
    one, two = errors[:, 0], errors[:, 1:].mean(axis=1)
    places = table.places()
    middle = np.abs(places - places.mean(axis=0)).mean(axis=0)
    return PlaceError(
        *(float(one.mean()), _spread(one), float(two.mean()), _spread(two)),
        *(float(middle[0]), float(middle[1:].mean())),
    )


def _spread(errors: Matrix) -> float:
    return float(errors.std()) if len(errors) > 1 else math.nan


def _left_out_errors(table: PositionTable, seed: int, draw: int) -> Matrix:
    """(3,) mean absolute errors of number, row and column, the mean over the folds."""
    places = table.places()
    order = np.random.default_rng(derive_seed("folds", seed, draw)).permutation(len(places))
    errors = []
    for left_out in np.array_split(order, FOLDS):
        known = np.setdiff1d(order, left_out)
        predicted = _predicted(table.rows[known], places[known], table.rows[left_out])
        errors.append(np.abs(predicted - places[left_out]).mean(axis=0))
    mean: Matrix = np.mean(errors, axis=0)
    return mean


def _predicted(rows: Matrix, targets: Matrix, others: Matrix) -> Matrix:
    """Least squares with an intercept, of least norm, applied to other rows."""
    middle, target = rows.mean(axis=0), targets.mean(axis=0)
    weights = np.linalg.lstsq(rows - middle, targets - target, rcond=None)[0]
    predicted: Matrix = (others - middle) @ weights + target
    return predicted
