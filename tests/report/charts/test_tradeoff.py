"""Accuracy against leakage: families, strength, the Pareto front, names of 21 defences."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.report.charts.tradeoff import (
    TradeoffPoint,
    draw_tradeoff,
    family_and_strength,
    pareto_front,
    points_from_comparison,
    strength_lines,
    tradeoff_chart,
)
from tests.report.charts.test_charts import texts, titles

COMPARISON = pd.read_csv(Path(__file__).parents[3] / "results/defenses/comparison.csv")
SCOPES = ("1 upload", "any number of uploads")


def point(accuracy: float, leakage: float, **changes: object) -> TradeoffPoint:
    made = TradeoffPoint(
        f"{accuracy:g}/{leakage:g}",
        *("noise", math.nan, accuracy, accuracy - 1, accuracy + 1),
        *(leakage, leakage - 1, leakage + 1, 20),
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("defence", "family", "strength"),
    [
        ("none", "none", math.nan),
        ("MJP γ=0.27; dal", "MJP", 0.27),
        ("MJP γ=0.5", "MJP", 0.5),
        ("MJP γ=0.27; dal; plain_share 0.5", "MJP", math.nan),
        ("gaussian_noise 0.1", "noise", 0.1),
        ("gaussian_noise 1e-05", "noise", 1e-5),
        ("dp_sgd 0.01", "DP-SGD", 0.01),
        ("dp_sgd 0.5 clip 2", "DP-SGD", 0.5),
        ("top_k 0.1", "sparsification", -0.1),
        ("float16", "quantisation", 1 / 16),
        ("int8", "quantisation", 1 / 8),
        ("sign", "quantisation", 1.0),
        ("withhold pos_embed", "withheld", math.nan),
        ("positions sinusoidal", "withheld", math.nan),
        ("MJP γ=0.27; dal; dp_sgd 0.01", "pairs with MJP", math.nan),
        ("MJP γ=0.27; withhold pos_embed", "pairs with MJP", math.nan),
        ("dp_sgd 1; top_k 0.1", "other", math.nan),
        ("something new 3", "other", math.nan),
    ],
)
def test_family_and_strength_of_a_defence(defence: str, family: str, strength: float) -> None:
    found = family_and_strength(defence)
    assert found[0] == family
    assert found[1] == pytest.approx(strength, nan_ok=True)


def test_points_are_the_rows_of_the_table() -> None:
    for scope in SCOPES:
        points = points_from_comparison(COMPARISON, scope)
        rows = COMPARISON[COMPARISON["scope"] == scope]
        assert [p.label for p in points] == rows["label"].tolist()
        assert [p.leakage for p in points] == rows["psnr"].tolist()
        assert [p.accuracy for p in points] == rows["top1"].tolist()
        assert [p.label for p in points if p.unattacked] == ["no patch gradient"]


def test_only_defences_differ_between_points() -> None:
    table = COMPARISON.copy()
    table.loc[table["label"] == "none", "batch"] = 4
    table.loc[table["label"] == "int8", "steps"] = 5
    labels = {p.label for p in points_from_comparison(table, "1 upload")}
    assert {"none", "int8"}.isdisjoint(labels)
    assert len(labels) == 19


def test_another_table_is_refused() -> None:
    with pytest.raises(UserError, match="psnr"):
        points_from_comparison(pd.DataFrame({"label": ["a"]}), "1 upload")


@pytest.mark.parametrize("seed", range(4))
def test_the_front_is_what_nobody_beats(seed: int) -> None:
    """Against the definition, pair by pair."""
    values = np.random.default_rng(seed).integers(0, 8, (25, 2)).astype(float)
    points = [point(a, b) for a, b in values]
    best = {
        (p.leakage, p.accuracy)
        for p in points
        if not any(
            (q.accuracy >= p.accuracy and q.leakage <= p.leakage)
            and (q.accuracy > p.accuracy or q.leakage < p.leakage)
            for q in points
        )
    }
    front = [(p.leakage, p.accuracy) for p in pareto_front(points)]
    assert set(front) == best
    assert front == sorted(front)


def test_lines_follow_the_strength() -> None:
    points = [point(50, 12, strength=1.0), point(60, 15, strength=0.1), point(40, 12)]
    points += [point(70, 20, strength=0.5), point(1, 1, family="MJP", strength=0.2)]
    (line,) = strength_lines(points)
    assert [p.strength for p in line] == [0.1, 0.5, 1.0]


# the drawing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
def test_every_one_of_21_defences_has_its_point_and_its_name(scope: str) -> None:
    points = points_from_comparison(COMPARISON, scope)
    found = tradeoff_chart(points, floor=12.45)
    assert {p.words for p in points} | {"Pareto front"} <= {*titles(found.svg)}
    assert {f"{n}  {p.label}" for n, p in enumerate(points, 1)} <= {*texts(found.svg)}
    assert {p.family for p in points} <= {*texts(found.svg)}
    assert "12.4 dB" in found.caption or "12.5 dB" in found.caption
    assert "no patch gradient" in found.caption


def test_a_point_stands_where_its_figures_are() -> None:
    """Leakage grows to the right, accuracy upwards; 12 to 20 dB have as much room as all beyond."""
    svg = tradeoff_chart([point(50, 12), point(60, 20), point(70, 100)]).svg
    uses = r"<title>{}[^<]*</title>.*?<use [^>]*x=\"([\d.]+)\" y=\"([\d.]+)\""
    places = [re.findall(uses.format(name), svg, re.S)[0] for name in ("50/12", "60/20", "70/100")]
    (x, y), (x2, y2), (x3, y3) = [(float(across), float(down)) for across, down in places]
    assert x2 - x == pytest.approx((x3 - x2) * 8.0 / 9.8, rel=0.01)
    assert y - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert y2 < y


@pytest.mark.parametrize(
    "points",
    [
        [],
        [point(50, 12)],
        [point(math.nan, 12), point(50, math.nan), point(50, math.inf)],
        [point(50, 12, accuracy_low=math.nan, leakage_high=math.nan)],
        [point(50, 100.0, leakage_high=100.0)] * 3,
        [point(0, 0.5, leakage_low=-3.0, family="<b>")],
    ],
)
def test_odd_points_do_not_break_the_drawing(points: list[TradeoffPoint], tmp_path: Path) -> None:
    found = tradeoff_chart(points)
    assert not re.search(r"\b(nan|inf)\b", found.svg)
    lacking = sum(not p.drawable for p in points)
    assert (f"{lacking} without accuracy" in found.caption) == (lacking > 0)
    draw_tradeoff({"all": points}, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("changes", "on_front"),
    [
        ({}, True),
        ({"n": 11, "not_scored": 9}, True),
        ({"n": 2, "not_scored": 18}, False),
        ({"n": 20, "not_reached": 12}, False),
    ],
)
def test_a_client_whose_pictures_mostly_have_no_score_is_not_on_the_front(
    changes: dict[str, int], on_front: bool
) -> None:
    private = point(90.0, 8.0, **changes)
    assert (private in pareto_front([private, point(80.0, 30.0)])) == on_front
