"""What another training seed moves: against ordinary least squares and on planted noise."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from mjp_privacy.core.errors import UserError
from mjp_privacy.report.results.claims import Claims
from mjp_privacy.report.results.lines import select
from mjp_privacy.report.results.seed_spread import SeedSpread, seed_spread
from mjp_privacy.report.results.tables import render

ROWS = ("A", "B", "G", "J", "gamma_0.09")
SPREAD = {"csv": "summary.csv", "seeds": [0, 1], "paper": 4, "against": "A"}


def planted(rows: int, seeds: int, deviation: float) -> NDArray[np.float64]:
    """Row effects, seed effects and noise of this deviation."""
    random = np.random.default_rng(7)
    effects = random.normal(0, 5, (rows, 1)) + random.normal(0, 3, (1, seeds))
    return 60 + effects + random.normal(0, deviation, (rows, seeds))


def least_squares_deviation(values: NDArray[np.float64]) -> float:
    """The residual deviation of value ~ row + seed, fitted with dummy columns."""
    rows, seeds = values.shape
    row, seed = np.repeat(np.arange(rows), seeds), np.tile(np.arange(seeds), rows)
    design = np.column_stack((np.eye(rows)[row], np.eye(seeds)[seed][:, 1:]))
    _, squares, rank, _ = np.linalg.lstsq(design, values.ravel(), rcond=None)
    return math.sqrt(float(squares[0]) / (values.size - int(rank)))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Five rows from two seeds, and one row from one seed."""
    values = {
        "A": (65, 67),
        "B": (58, 58.4),
        "G": (62, 64.6),
        "J": (63, 64),
        "gamma_0.09": (63, 65),
    }
    lines = [
        {"model": f"{row}_{seed}", "top1": top1, "consistency": 100.0 if row == "B" else top1 + 20}
        for row, of_row in values.items()
        for seed, top1 in enumerate(of_row)
    ]
    lines.append({"model": "C_0", "top1": 56.0, "consistency": 90.0})
    pd.DataFrame(lines).to_csv(tmp_path / "summary.csv", index=False)
    return tmp_path


def cells(results: Path, **changes: object) -> list[list[str]]:
    table = {"spread": {**SPREAD, "measures": {"top1": [], "consistency": ["B"]}, **changes}}
    text = render(table, {}, results)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


@pytest.mark.parametrize(("rows", "seeds"), [(2, 2), (15, 2), (6, 4)])
def test_the_deviation_is_that_of_least_squares(rows: int, seeds: int) -> None:
    values = planted(rows, seeds, 0.8)
    spread = SeedSpread([str(row) for row in range(rows)], values)
    assert spread.deviation == pytest.approx(least_squares_deviation(values), rel=1e-9)
    assert spread.freedom == (rows - 1) * (seeds - 1)


@pytest.mark.parametrize("rows", [3, 15])
def test_the_interval_covers_a_difference_as_often_as_it_says(rows: int) -> None:
    """Of 2,000 draws of so many rows × 2 seeds, 95 % of the intervals hold the true difference;
    with normal quantiles 81 % of those of three rows would."""
    random, held, draws = np.random.default_rng(3), 0, 2000
    for _ in range(draws):
        values = random.normal(0, 1.3, (rows, 2)) + random.normal(0, 4, (1, 2))
        values[1] += 2.0
        spread = SeedSpread([str(row) for row in range(rows)], values)
        by_seed = spread.differences("1", "0")
        assert by_seed is not None
        held += abs(by_seed.mean() - 2.0) <= spread.resolved
    assert 0.935 <= held / draws <= 0.965


def test_by_hand() -> None:
    """Differences of the seeds 2, 0, 1: the noise of each row is ±.5, ∓.5 and 0; its variance
    4 × .25 / 2. Of 2 degrees of freedom the quantile is 4.3027."""
    spread = SeedSpread("ABC", np.array([[1.0, 3.0], [5.0, 5.0], [8.0, 9.0]]))
    assert spread.deviation == pytest.approx(math.sqrt(0.5))
    assert spread.resolved == pytest.approx(4.302653 * math.sqrt(0.5))
    assert spread.single == pytest.approx(4.302653)


def test_what_a_seed_moves_in_all_rows_alike_is_no_noise() -> None:
    values = np.array([[60.0, 62.0], [55.0, 57.0], [50.0, 52.0]])
    assert SeedSpread("ABC", values).deviation == pytest.approx(0, abs=1e-12)
    assert SeedSpread("ABC", values).widest == 2.0


def test_rows_of_one_seed_and_fixed_rows_are_left_out(results: Path) -> None:
    summary = pd.read_csv(results / "summary.csv")
    spread = seed_spread(summary, "consistency", [0, 1], fixed=["B"])
    assert tuple(spread.rows) == ROWS
    assert (spread.figure("rows"), spread.freedom) == (4, 3)
    free = spread.values[[0, 2, 3, 4]]
    assert spread.deviation == pytest.approx(least_squares_deviation(free))
    assert spread.widest == pytest.approx(2.6)


def test_the_table_has_each_seed_the_mean_and_the_paper_s_difference(results: Path) -> None:
    heads, _, *rows = cells(results)
    assert heads[:4] == ["row", "top-1 − A, by seed", "top-1 − A, mean [95 %]", "top-1 − A, paper"]
    by_row = {row[0][0]: row[1:] for row in rows}
    assert [*by_row] == [*"BCDEFGHIJ"]
    half = seed_spread(pd.read_csv(results / "summary.csv"), "top1", [0, 1]).resolved
    assert by_row["G"][:3] == [
        "-3.0, -2.4",
        f"-2.7 [{-2.7 - half:+.1f}, {-2.7 + half:+.1f}]",
        "+0.3",
    ]
    assert by_row["C"] == ["–", "–", "-4.9", "–", "–", "+10.5"]  # from one seed
    assert by_row["B"][3:] == ["+15.0, +13.0", "+14.0", "+35.7"]  # fixed: no interval
    from_b = {row[0][0]: row[1:] for row in cells(results, against="B")[2:]}
    assert from_b["A"][3:] == ["-15.0, -13.0", "-14.0", "-35.7"]  # nor from a fixed row


def test_a_figure_that_is_missing_leaves_its_row_out(results: Path) -> None:
    summary = pd.read_csv(results / "summary.csv")
    summary.loc[summary["model"] == "G_1", "top1"] = math.nan
    spread = seed_spread(summary, "top1", [0, 1])
    assert tuple(spread.rows) == ("A", "B", "J", "gamma_0.09")
    assert math.isfinite(spread.deviation)


def test_names_that_are_not_there_are_refused(results: Path) -> None:
    with pytest.raises(UserError, match="no column 'top9'; expected model, top1, consistency"):
        select({"csv": "summary.csv", "measure": "top9", "seeds": [0, 1]}, results)
    with pytest.raises(UserError, match=r"against: expected one of A, B, .*, got 'Z'"):
        cells(results, against="Z")


def test_one_row_alone_tells_no_noise(results: Path) -> None:
    lone = seed_spread(pd.read_csv(results / "summary.csv").head(2), "top1", [0, 1])
    assert math.isnan(lone.deviation)
    assert math.isnan(lone.resolved)
    nothing = seed_spread(pd.read_csv(results / "summary.csv").head(0), "top1", [0, 1])
    assert (nothing.figure("rows"), nothing.widest) == (0, 0.0)
    assert cells(results, seeds=[0, 5])[2][1:3] == ["–", "–"]


def test_a_sentence_can_name_its_numbers(results: Path) -> None:
    figures = select({"csv": "summary.csv", "measure": "top1", "seeds": [0, 1]}, results)
    assert figures.figure("widest") == pytest.approx(2.6)
    with pytest.raises(UserError, match="no figure 'mean' of seeds; expected one of rows"):
        figures.figure("mean")


def test_claims_render_it(results: Path) -> None:
    (results / "results").mkdir()
    (results / "summary.csv").rename(results / "results" / "summary.csv")
    (results / "results" / "claims.yaml").write_text(
        "lines:\n  seeds: {csv: summary.csv, measure: top1, seeds: [0, 1]}\n"
        "claims:\n  - {file: t.md, text: 'up to {seeds.widest:.1f} points'}\n"
    )
    (results / "t.md").write_text("Seeds differ by up to 9.9 points.\n")
    (verdict,) = Claims(results).verdicts()
    assert (verdict.holds, verdict.expected) == (False, "up to 2.6 points")
