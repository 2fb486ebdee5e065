"""Explained variance and energy: beside other implementations, by hand, and where planted."""

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from mjp_privacy.paper.positions import (
    PositionTable,
    at,
    dimensions_for,
    energy,
    explained_variance,
    noise_table,
    projection,
)


def of_rank(rank: int, *, grid: int = 5, width: int = 12) -> PositionTable:
    generator = np.random.default_rng(rank)
    left, right = generator.normal(size=(grid**2, rank)), generator.normal(size=(rank, width))
    return PositionTable(grid, left @ right)


def test_the_variance_is_that_of_the_covariances_eigenvalues() -> None:
    table = noise_table(6, 20, seed=1)
    eigenvalues = np.sort(np.linalg.eigvalsh(np.cov(table.rows.T)))[::-1]
    expected = np.cumsum(eigenvalues) / eigenvalues.sum()
    assert explained_variance(table) == pytest.approx(expected)


def test_the_energy_is_that_of_the_gram_matrix_of_the_rows_as_they_are() -> None:
    table = PositionTable(6, noise_table(6, 20, seed=1).rows + 3)
    eigenvalues = np.sort(np.linalg.eigvalsh(table.rows.T @ table.rows))[::-1]
    assert energy(table) == pytest.approx(np.cumsum(eigenvalues) / eigenvalues.sum())
    assert at(energy(table), 1) > at(explained_variance(table), 1) + 0.5  # the common part


def test_by_hand() -> None:
    """Nine rows: ±3, ±2 and ±1 along three axes, and zeros. Σσ² = 18 + 8 + 2."""
    rows = np.zeros((9, 4))
    rows[[0, 1], 0], rows[[2, 3], 1], rows[[4, 5], 2] = (3, -3), (2, -2), (1, -1)
    curve = explained_variance(PositionTable(3, rows))
    assert curve == pytest.approx([18 / 28, 26 / 28, 1, 1])
    assert dimensions_for(curve, 0.9) == 2
    assert dimensions_for(curve, 26 / 28) == 2
    assert dimensions_for(curve, 0.95) == 3
    assert at(curve, 3) == at(curve, 99) == 1


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_table_of_rank_3_has_everything_in_3_dimensions(rank: int) -> None:
    assert at(explained_variance(of_rank(rank)), 3) == pytest.approx(1)
    assert at(energy(of_rank(rank)), 3) == pytest.approx(1)
    assert at(explained_variance(of_rank(5)), 3) < 0.99


def test_neither_order_nor_place_nor_scale_of_the_rows_matters() -> None:
    table = noise_table(5, 12, seed=2)
    order = np.random.default_rng(0).permutation(25)
    for rows in (table.rows[order], table.rows + 7, 3 * table.rows):
        assert explained_variance(PositionTable(5, rows)) == pytest.approx(
            explained_variance(table)
        )


def test_the_projection_keeps_distances_where_it_loses_nothing() -> None:
    table = of_rank(3)
    points = projection(table, 3)
    assert pdist(points) == pytest.approx(pdist(table.rows))
    assert (np.diff((points**2).sum(axis=0)) <= 0).all()


def test_the_projection_has_one_sign() -> None:
    table = of_rank(4)
    mirrored = PositionTable(5, table.rows * np.array([1, -1] * 6))
    assert np.abs(projection(table)).max(axis=0) == pytest.approx(projection(table).max(axis=0))
    assert projection(mirrored) == pytest.approx(projection(table))


def test_noise_has_the_variance_of_noise() -> None:
    """Marchenko-Pastur's largest share, and no table like another."""
    tables = [noise_table(8, 160, seed) for seed in range(10)]
    shares = [at(explained_variance(table), 3) for table in tables]
    edge = (1 + np.sqrt(64 / 160)) ** 2 * 160  # of the largest squared singular value
    assert 0.08 < min(shares) < max(shares) < 3 * edge / (63 * 160)
    assert len(set(shares)) == 10
    assert (noise_table(8, 160, 3).rows == tables[3].rows).all()
    assert np.mean([table.rows.std() for table in tables]) == pytest.approx(1, abs=0.01)
