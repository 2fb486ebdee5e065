"""Accuracy against leakage: families, strength, the Pareto front, labels of 21 defences."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.report.charts.labels import Box, text_width
from mjp_privacy.report.charts.svg import SIZE, number
from mjp_privacy.report.charts.tradeoff import frame_of, tradeoff_chart
from mjp_privacy.report.charts.tradeoff_png import draw_tradeoff
from mjp_privacy.report.charts.tradeoff_points import (
    TradeoffPoint,
    family_and_strength,
    pareto_front,
    points_from_comparison,
    strength_lines,
)

COMPARISON = Path(__file__).parents[3] / "results/defenses/comparison.csv"
SCOPES = ("1 upload", "any number of uploads")
SVG = "{http://www.w3.org/2000/svg}"


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
    table = pd.read_csv(COMPARISON)
    for scope in SCOPES:
        points = points_from_comparison(COMPARISON, scope)
        rows = table[table["scope"] == scope]
        assert [p.label for p in points] == rows["label"].tolist()
        assert [p.leakage for p in points] == rows["psnr"].tolist()
        assert [p.accuracy for p in points] == rows["top1"].tolist()
        assert [p.label for p in points if p.unattacked] == ["no patch gradient"]


def test_only_defences_differ_between_points() -> None:
    table = pd.read_csv(COMPARISON)
    table.loc[table["label"] == "none", "batch"] = 4
    table.loc[table["label"] == "int8", "steps"] = 5
    labels = {p.label for p in points_from_comparison(table)}
    assert {"none", "int8"}.isdisjoint(labels)
    assert len(labels) == 19


def test_another_table_is_refused() -> None:
    with pytest.raises(UserError, match="psnr"):
        points_from_comparison(pd.DataFrame({"label": ["a"]}))


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


def test_what_was_not_attacked_or_measured_is_not_on_the_front() -> None:
    unattacked = point(90, 5, not_reached=20)
    assert pareto_front([unattacked, point(math.nan, 5), point(50, 12)]) == [point(50, 12)]


def test_lines_follow_the_strength() -> None:
    points = [point(50, 12, strength=1.0), point(60, 15, strength=0.1), point(40, 12)]
    points += [point(70, 20, strength=0.5), point(1, 1, family="MJP", strength=0.2)]
    (line,) = strength_lines(points)
    assert [p.strength for p in line] == [0.1, 0.5, 1.0]


# the drawing --------------------------------------------------------------------------------------


def text_boxes(svg: str) -> dict[str, Box]:
    """Labels of points in a drawing: those with a rim."""
    boxes = {}
    for text in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        if text.get("paint-order"):
            shown = (text.text or "") + "".join(child.tail or "" for child in text)
            x, y = float(text.get("x", "")), float(text.get("y", ""))
            boxes[shown] = Box(x, y - 0.8 * SIZE, x + text_width(shown, SIZE), y + 0.2 * SIZE)
    return boxes


@pytest.mark.parametrize("scope", SCOPES)
def test_labels_of_21_defences_are_apart_and_off_the_points(scope: str) -> None:
    points = points_from_comparison(COMPARISON, scope)
    chart = tradeoff_chart(points, floor=12.45)
    boxes = text_boxes(chart.svg)
    assert set(boxes) == {p.label for p in points}
    assert len(boxes) == 21
    assert not [pair for pair in combinations(boxes, 2) if boxes[pair[0]].meets(boxes[pair[1]])]
    path = re.compile(r'<path d="M([^"]+)z" fill="(?!none)[^"]+" stroke=')
    corners = [re.findall(r"([-\d.]+) ([-\d.]+)", found) for found in path.findall(chart.svg)]
    markers = [
        (sum(float(x) for x, _ in c) / len(c), sum(float(y) for _, y in c) / len(c))
        for c in corners
    ]
    assert len(markers) == 8 + 20  # eight families explained; one of the 21 points is hollow
    assert not any(
        box.left < x < box.right and box.top < y < box.bottom
        for box in boxes.values()
        for x, y in markers[8:]
    )


def test_the_scale_separates_12_to_20_as_well_as_100() -> None:
    points = points_from_comparison(COMPARISON)
    frame = frame_of(points, 12.45, Box(0, 0, 1000, 400))
    assert frame.x.at(20) - frame.x.at(12) > 300
    assert frame.x.at(100) == 1000
    assert frame.x.at(100) - frame.x.at(40) > 100


def test_a_point_stands_where_its_figures_are() -> None:
    points = [point(50, 12), point(60, 30)]
    chart = tradeoff_chart(points)
    frame = frame_of(points, math.nan, Box(48, 60, 700, 490))
    for shown in points:
        x, y = frame.at(shown.leakage, shown.accuracy)
        top = y - 1.15 * 5  # of its triangle
        assert f'd="M{number(x)} {number(top)}L' in chart.svg
    assert frame.at(12, 50)[0] < frame.at(30, 50)[0]  # leakage grows to the right
    assert frame.at(12, 60)[1] < frame.at(12, 50)[1]  # accuracy upwards


@pytest.mark.nightly
@pytest.mark.parametrize(
    "points",
    [
        [],
        [point(50, 12)],
        [point(math.nan, 12), point(50, math.nan)],
        [point(50, math.inf)],
        [point(50, 12, accuracy_low=math.nan, leakage_high=math.nan)],
        [point(50, 100.0, leakage_high=100.0)] * 3,
        [point(0, 0.5, leakage_low=-3.0)],
        [point(50, 12, label="</svg><script>" + "x" * 300, family="<b>")],
    ],
)
def test_odd_points_do_not_break_the_drawing(points: list[TradeoffPoint], tmp_path: Path) -> None:
    chart = tradeoff_chart(points)
    ElementTree.fromstring(chart.svg)
    assert "<script" not in chart.svg
    lacking = sum(not p.drawable for p in points)
    assert (f"{lacking} without accuracy" in chart.caption) == (lacking > 0)
    draw_tradeoff({"all": points}, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 0


def test_the_png_is_small_and_shows_every_family(tmp_path: Path) -> None:
    panels = {scope: points_from_comparison(COMPARISON, scope) for scope in SCOPES}
    draw_tradeoff(panels, tmp_path / "t.png", floors=dict.fromkeys(SCOPES, 12.45))
    assert (tmp_path / "t.png").stat().st_size < 150_000
    picture = np.asarray(Image.open(tmp_path / "t.png").convert("RGB")).astype(int)
    assert picture.shape[1] == 1080
    assert (picture[0] == 255).all()
    for colour in ((0, 114, 178), (213, 94, 0), (0, 158, 115), (230, 159, 0), (136, 34, 85)):
        assert (picture == colour).all(axis=2).sum() > 50
