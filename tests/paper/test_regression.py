"""Linear maps from embedding to place: planted answers, another implementation, chance."""

import math

import numpy as np
import pytest
import scipy.linalg

from mjp_privacy.core.machine import derive_seed
from mjp_privacy.paper.positions import FOLDS, Matrix, PositionTable, noise_table, place_error


def linear(grid: int, width: int, noise: float = 0.0) -> PositionTable:
    """Row and column through a random linear map, with an offset."""
    generator = np.random.default_rng(0)
    places = PositionTable(grid, np.zeros((grid**2, 1))).places()[:, 1:]
    rows = places @ generator.normal(size=(2, width)) + generator.normal(size=width)
    return PositionTable(grid, rows + noise * generator.normal(size=rows.shape))


@pytest.mark.parametrize("width", [2, 5, 100])
def test_a_table_that_is_linear_in_the_place_is_read_exactly(width: int) -> None:
    error = place_error(linear(6, width))
    assert (error.mae_1d, error.mae_2d) == pytest.approx((0, 0), abs=1e-10)


def test_the_same_rows_in_another_order_tell_nothing() -> None:
    table = linear(8, 20, noise=0.01)
    order = np.random.default_rng(1).permutation(64)
    error = place_error(PositionTable(8, table.rows[order]))
    assert error.mae_2d > 0.9 * error.constant_2d
    assert place_error(table).mae_2d < 0.05


@pytest.mark.parametrize("width", [3, 200])
def test_noise_is_no_better_than_a_constant_guess(width: int) -> None:
    errors = [place_error(noise_table(9, width, seed), repeats=2) for seed in range(4)]
    assert np.mean([error.mae_2d for error in errors]) > 0.95 * errors[0].constant_2d
    assert np.mean([error.mae_1d for error in errors]) > 0.95 * errors[0].constant_1d


def test_the_constant_guess_by_hand() -> None:
    """3×3: rows miss the middle by 1, 0, 1; numbers 0 to 8 by 4, 3, 2, 1, 0, 1, 2, 3, 4."""
    error = place_error(noise_table(3, 2, 0))
    assert error.constant_2d == pytest.approx(2 / 3)
    assert error.constant_1d == pytest.approx(20 / 9)


def other_errors(table: PositionTable, solve: object) -> Matrix:
    """Number, row, column: mean absolute errors by another solver, over the same folds."""
    places, errors = table.places(), []
    order = np.random.default_rng(derive_seed("folds", 0, 0)).permutation(len(places))
    for fold in np.array_split(order, FOLDS):
        known = np.array([patch for patch in range(len(places)) if patch not in fold])
        predicted = solve(table.rows[known], places[known], table.rows[fold])  # type: ignore[operator]
        errors.append([np.mean(np.abs(predicted - places[fold])[:, i]) for i in range(3)])
    return np.mean(errors, axis=0)


def with_a_column_of_ones(rows: Matrix, targets: Matrix, others: Matrix) -> Matrix:
    """The intercept as one more number; SciPy's QR. Unique where patches exceed numbers."""
    system = np.column_stack([rows, np.ones(len(rows))])
    weights = scipy.linalg.lstsq(system, targets, lapack_driver="gelsy")[0]
    return np.column_stack([others, np.ones(len(others))]) @ weights


def nearly_no_ridge(rows: Matrix, targets: Matrix, others: Matrix) -> Matrix:
    """Ridge regression, its intercept free, with a penalty that goes to zero: the least norm."""
    middle, target = rows.mean(0), targets.mean(0)
    kernel = (rows - middle) @ (rows - middle).T
    duals = scipy.linalg.solve(kernel + 1e-7 * np.eye(len(rows)), targets - target)
    return (others - middle) @ (rows - middle).T @ duals + target


@pytest.mark.parametrize(
    ("width", "solve"), [(6, with_a_column_of_ones), (60, nearly_no_ridge)], ids=["thin", "wide"]
)
def test_beside_another_implementation(width: int, solve: object) -> None:
    table = linear(6, width, noise=1.0)
    number, row, column = other_errors(table, solve)
    error = place_error(table, repeats=1)
    assert error.mae_1d == pytest.approx(number, rel=1e-5)
    assert error.mae_2d == pytest.approx((row + column) / 2, rel=1e-5)
    assert error.mae_1d < 6 * row + column  # a patch's number is 6 rows and a column
    assert math.isnan(error.std_1d)  # of one draw of the folds
    assert math.isnan(error.std_2d)


def test_turning_the_embeddings_changes_nothing() -> None:
    table = noise_table(5, 40, seed=3)
    turn = scipy.linalg.qr(np.random.default_rng(0).normal(size=(40, 40)))[0]
    turned = place_error(PositionTable(5, table.rows @ turn))
    assert turned.mae_2d == pytest.approx(place_error(table).mae_2d)


def test_draws_of_the_folds_are_seeded() -> None:
    table = linear(6, 10, noise=1.0)
    assert place_error(table, seed=4) == place_error(table, seed=4)
    assert place_error(table, seed=4) != place_error(table, seed=5)
    assert place_error(table).std_2d > 0
