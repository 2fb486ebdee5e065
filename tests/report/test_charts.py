"""Charts: XML with its hover texts, strangers' words as text, and what is drawn where; accuracy
against leakage with its families, strengths and Pareto front."""

import dataclasses
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mjp_privacy.core.drawing import Chart
from mjp_privacy.metrics.statistics import Share
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.curves import UPLOADS, curve_of, distribution_charts, panel_charts
from mjp_privacy.report.lines import Line
from mjp_privacy.report.tradeoff import (
    TradeoffPoint,
    draw_tradeoff,
    family_of,
    pareto_front,
    points_from_comparison,
    tradeoff_chart,
)
from tests.helpers.card_run import card_run
from tests.helpers.report_rows import (
    HOSTILE,
    cell,
    intact,
    lines_of,
    run_of,
)

SVG = "{http://www.w3.org/2000/svg}"
WILD = HOSTILE + "</svg><script>alert(1)</script>]]>-->$\\frac{1}$ \x00\x1b\u202e\ud800\ufffe"
ELEMENTS = {"svg", "title", "desc", "style", "g", "defs", "path", "use", "text", "clipPath", "rect"}


def titles(svg: str) -> set[str]:
    """The hover texts, without the chart's own title."""
    return {title.text or "" for title in [*ElementTree.fromstring(svg).iter(f"{SVG}title")][1:]}


def texts(svg: str) -> set[str]:
    return {"".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}


def line_of(folder: Path, psnr: list[float | str], **more: Any) -> Line:
    (line,) = lines_of(run_of(folder, (cell("one"), psnr), **more))
    return line


def point(accuracy: float, leakage: float, **changes: object) -> TradeoffPoint:
    made = TradeoffPoint(
        f"{accuracy:g}/{leakage:g}",
        *("noise", accuracy, accuracy - 1, accuracy + 1),
        *(leakage, leakage - 1, leakage + 1, 20),
    )
    return dataclasses.replace(made, **changes)


def made(folder: Path, word: str) -> list[Chart]:
    """One chart of every kind, each with this word wherever a stranger's can stand."""
    line = line_of(folder, [10.0, 40.0, math.inf, "failed"])
    points_of_run = read_contents([card_run(folder / "uploads")]).points
    words = pd.Series(word, points_of_run.index, dtype=object)  # no text column takes all of them
    table = points_of_run.assign(model=words, options=words)
    families = enumerate(("none", "MJP", "noise"))
    points = [point(50, 9 + i, label=word + kind, family=kind) for i, kind in families]
    drawn = [*distribution_charts([(word, line)]), *panel_charts(table, UPLOADS)]
    return [*drawn, tradeoff_chart(points, floor=8.0)]


def test_charts_have_their_own_elements_alone(tmp_path: Path) -> None:
    for found in made(tmp_path, WILD):
        root = ElementTree.fromstring(found.svg)
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= ELEMENTS
        assert not [n for e in root.iter() for n in e.attrib if n.lower().startswith("on")]
        assert any("<script>" in text for text in root.itertext())
        assert root.findtext(f"{SVG}title")
        assert root.findtext(f"{SVG}desc")
        assert not re.search(r"\b(nan|inf)\b", found.svg)


# shares over thresholds ---------------------------------------------------------------------------

SCORES: list[float | str] = [12.0, 20.0, 30.0, 45.0, math.inf, "failed", "unsupported", "unscored"]
COUNTS = {0: 5, 12: 5, 12.001: 4, 20: 4, 20.001: 3, 30: 3, 44: 2, 45.001: 1, 100: 1}


def test_success_is_the_share_of_all_tried_that_reaches_each_threshold(tmp_path: Path) -> None:
    curve = curve_of(line_of(tmp_path, SCORES))
    assert curve.of == 7
    for place, count in COUNTS.items():
        step = np.searchsorted(curve.thresholds, place, side="right") - 1
        assert curve.share[step] / 100 == pytest.approx(count / curve.of), place


@pytest.mark.parametrize(("photographs", "trials"), [(None, 12), (5, 4.8)])
def test_bands_are_wilsons_over_photographs(
    tmp_path: Path, photographs: int | None, trials: float
) -> None:
    """Twelve images of five photographs count as 12² / (3² + 3² + 2² + 2² + 2²)."""
    values = np.random.default_rng(1).normal(25, 8, 12)
    curve = curve_of(line_of(tmp_path, [*values], photographs=photographs))
    for at, limit in enumerate(curve.thresholds):
        known = Share(int((values >= limit).sum()), 12, trials=trials).interval
        assert (curve.low[at], curve.high[at]) == pytest.approx(known, abs=1e-3)


# accuracy against leakage -------------------------------------------------------------------------

COMPARISON = pd.read_csv(Path(__file__).parents[2] / "results/defenses/comparison.csv")


@pytest.mark.parametrize(
    ("defence", "family"),
    [
        ("none", "none"),
        ("MJP γ=0.27; dal; plain_share 0.5", "MJP"),
        ("gaussian_noise 1e-05", "noise"),
        ("dp_sgd 0.5 clip 2", "DP-SGD"),
        ("top_k 0.1", "sparsification"),
        ("sign", "quantisation"),
        ("train head", "withheld"),
        ("MJP γ=0.27; dal; dp_sgd 0.01", "pairs with MJP"),
        ("dp_sgd 1; top_k 0.1", "other"),
    ],
)
def test_the_family_of_a_defence(defence: str, family: str) -> None:
    assert family_of(defence) == family


@pytest.mark.parametrize("scope", ["1 upload", "any number of uploads"])
def test_points_are_the_rows_of_the_table_and_each_has_its_name(scope: str) -> None:
    table = COMPARISON.copy()
    table.loc[table["label"] == "no patch gradient", "unreached"] = 20  # no attack made a picture
    points = points_from_comparison(table, scope)
    rows = table[table["scope"] == scope]
    kept = [(p.label, p.leakage, p.accuracy) for p in points]
    assert kept == [*rows[["label", "psnr", "top1"]].itertuples(index=False, name=None)]
    assert [p.label for p in points if p.unattacked] == ["no patch gradient"]
    found = tradeoff_chart(points, floor=12.5)
    assert {p.words for p in points} | {"Pareto front"} <= titles(found.svg)
    assert {f"{n}  {p.label}" for n, p in enumerate(points, 1)} <= texts(found.svg)
    assert {p.family for p in points} <= texts(found.svg)
    assert "12.5 dB" in found.caption
    assert "no patch gradient" in found.caption


def test_a_run_of_several_defences_has_its_chart(tmp_path: Path) -> None:
    """Without the client on which fewer attacks were run; one on which they failed is hollow."""
    noise = {f"noise {n}": {"defenses": f"gaussian_noise {n}"} for n in (0.1, 0.01, 1)}
    cells = [
        intact(f"{name} {attack}", attack=attack, **facts)
        for name, facts in {"plain": {}, **noise, "int8": {"defenses": "int8"}}.items()
        for attack in ("patch_gradient", "patch_prior")
    ][:-1]
    known = {"top1": 1.0, "grey_psnr": 11.0}
    control = (intact("mean_image", role="floor"), [13.0] * 3, known)
    psnr: dict[bool, list[float | str]] = {False: [15.0, 16.0, 17.0]}
    psnr[True] = ["failed", 16.0, "failed"]
    lines = ((entry, psnr[entry["run_id"].startswith("noise 1 ")], known) for entry in cells)
    run_of(tmp_path, *lines, control)
    (found,) = read_contents([tmp_path]).charts["tradeoff"]
    named = [title for title in titles(found.svg) if "16.0 dB" in title]
    assert len(named) == 4
    assert sum("100.0 % [43.9, 100.0]" in title for title in named) == 3  # Wilson's, of 3 of 3
    assert re.search(r"Hollow.*gaussian noise 1\b", found.caption)
    assert "11.0 dB" in found.caption  # the grey's, not that of a better control
    assert " 1 further client" in found.caption


def test_only_defences_differ_between_points() -> None:
    table = COMPARISON.copy()
    table.loc[table["label"] == "none", "batch"] = 4
    table.loc[table["label"] == "int8", "steps"] = 5
    labels = {p.label for p in points_from_comparison(table, "1 upload")}
    assert {"none", "int8"}.isdisjoint(labels)
    assert len(labels) == 19


@pytest.mark.parametrize("seed", range(4))
def test_the_front_is_what_nobody_beats(seed: int) -> None:
    """Against the definition, pair by pair."""
    values = np.random.default_rng(seed).integers(0, 8, (25, 2)).astype(float)
    better = {
        (a, b): any(q[0] >= a and q[1] <= b and (q[0] > a or q[1] < b) for q in values)
        for a, b in values
    }
    front = [(p.accuracy, p.leakage) for p in pareto_front([point(a, b) for a, b in values])]
    assert set(front) == {pair for pair, is_beaten in better.items() if not is_beaten}
    assert front == sorted(front, key=lambda pair: pair[::-1])


@pytest.mark.parametrize(
    ("changes", "on_front"),
    [({}, True), ({"lost": 0.5}, False), ({"lost": 0.45}, True)],
)
def test_a_client_whose_pictures_mostly_have_no_score_is_not_on_the_front(
    changes: dict[str, float], on_front: bool
) -> None:
    private = point(90.0, 8.0, **changes)
    assert (private in pareto_front([private, point(80.0, 30.0)])) == on_front


@pytest.mark.parametrize(
    "points",
    [
        [],
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
    draw_tradeoff({"all": points}, tmp_path / "t.png", floors={"all": math.nan})
    assert (tmp_path / "t.png").stat().st_size > 0
