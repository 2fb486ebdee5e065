"""What every chart is: XML with its hover texts, strangers' words as text, equal bytes again."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mjp_privacy.core.drawing import COLOURS, drawn, house_style
from mjp_privacy.report.charts.chart import (
    LIGHTER,
    VARIABLES,
    Chart,
    axes_at,
    chart,
    hover,
    new_figure,
    standalone,
    stretch,
)
from mjp_privacy.report.charts.curves import uploads_charts
from mjp_privacy.report.charts.distributions import distribution_charts
from mjp_privacy.report.charts.tradeoff import TradeoffPoint, tradeoff_chart
from tests.helpers.ladder_rows import ladder_of, lines_of
from tests.helpers.report_rows import HOSTILE, cell

SVG = "{http://www.w3.org/2000/svg}"
WILD = HOSTILE + "</svg><script>alert(1)</script>]]>-->$\\frac{1}$ \x00\x1b\u202e\ud800\ufffe"
ELEMENTS = {"svg", "title", "desc", "style", "g", "defs", "path", "use", "text", "clipPath", "rect"}


def titles(svg: str) -> list[str]:
    """The hover texts, without the chart's own title."""
    return [title.text or "" for title in ElementTree.fromstring(svg).iter(f"{SVG}title")][1:]


def texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def uploads_table(rows: list[tuple[float, int, float]], **changes: object) -> pd.DataFrame:
    """Points of one panel: (γ, uploads, PSNR)."""
    known: dict[str, object] = {
        **{"model": "ViT", "setting": "c", "dtype": "float32", "attack": "multi_round"},
        **{"options": "", "differs": "", "n": 20, "panel": 1, "grey_mean": 12.0},
    }
    ends = [(f"psnr_{name}{end}", d) for name in ("median", "mean") for end, d in ENDS.items()]
    records = [
        known | {"gamma": gamma, "uploads": uploads} | {name: psnr + d for name, d in ends}
        for gamma, uploads, psnr in rows
    ]
    return pd.DataFrame([record | changes for record in records])


ENDS = {"": 0, "_lo": -1, "_hi": 1}


def made(folder: Path, word: str) -> list[Chart]:
    """One chart of every kind, each with this word wherever a stranger's can stand."""
    scores: list[float | str] = [10.0, 40.0, math.inf, "failed"]
    (line,) = lines_of(ladder_of(folder, (cell("one"), scores)))
    table = uploads_table([(0.1, 1, 20.0), (0.1, 2, 30.0)], model=word, options=word)
    points = [
        TradeoffPoint(word + family, family, 1.0, *(50.0, 40.0, 60.0), *(9.0 + i, 8.0, 30.0), 3)
        for i, family in enumerate(("none", "MJP", "noise"))
    ]
    return [
        *distribution_charts([(word, line)]),
        *uploads_charts(table),
        tradeoff_chart(points, floor=8.0),
    ]


def test_words_of_strangers_are_text_in_every_chart(tmp_path: Path) -> None:
    charts = made(tmp_path, WILD)
    assert [c.name for c in charts] == ["success", "lpips", "spread", "uploads_1", "tradeoff"]
    for found in charts:
        root = ElementTree.fromstring(found.svg)
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= ELEMENTS
        assert not [n for e in root.iter() for n in e.attrib if n.lower().startswith("on")]
        assert any("<script>" in text for text in root.itertext())
        assert root.findtext(f"{SVG}title")
        assert root.findtext(f"{SVG}desc")
        ElementTree.fromstring(standalone(found.svg))


def test_equal_rows_are_equal_bytes(tmp_path: Path) -> None:
    assert made(tmp_path / "a", "name") == made(tmp_path / "b", "name")


def test_ids_of_the_charts_of_a_page_are_apart(tmp_path: Path) -> None:
    ids = [set(re.findall(r'\bid="([^"]+)"', found.svg)) for found in made(tmp_path, "name")]
    assert sum(map(len, ids)) == len(set().union(*ids))
    for found, own in zip(made(tmp_path / "again", "name"), ids, strict=True):
        used = re.findall(r'(?:url\(|href=")#([^")]+)', found.svg)
        assert used
        assert set(used) <= own


def test_every_number_is_finite_and_short(tmp_path: Path) -> None:
    for found in made(tmp_path, "name"):
        assert not re.search(r"\b(nan|inf)\b", found.svg)
        places = re.findall(r' (?:d|x|y)="([^"]*)"', found.svg)
        assert places
        assert not any(re.search(r"\.\d\d", place) for place in places)


def test_a_page_paints_and_a_file_has_colours(tmp_path: Path) -> None:
    for found in made(tmp_path, "name"):
        assert "var(--ink, #1f2933)" in found.svg
        assert "var(" not in standalone(found.svg)
        assert set(re.findall(r"#[0-9a-f]{6}\b", standalone(found.svg))) <= {
            *(*COLOURS, *VARIABLES, *LIGHTER, *LIGHTER.values())
        }


def test_a_hover_text_shows_what_a_label_cuts() -> None:
    with house_style():
        figure = new_figure(100)
        axes = axes_at(figure, 40, 10, 400, 80)
        (curve,) = axes.plot([0, 1], [0, 1], label="a")
        hover(curve, "a <b> & c")
        found = chart(figure, "name", "title", "caption")
    assert titles(found.svg) == ["a <b> & c"]
    assert "<title>a &lt;b&gt; &amp; c</title>" in found.svg
    assert len(drawn("x" * 500)) <= 80
    assert drawn("_hidden").startswith(" ")


def test_an_axis_stretches_between_its_knots() -> None:
    axes = axes_at(new_figure(100), 0, 0, 440, 100)
    stretch(axes, (0.0, 10.0, 40.0, 100.0), (0.0, 1.0, 7.0, 10.0))
    axes.set_xlim(0, 100)
    places = [axes.transData.transform((value, 0))[0] / 440 for value in (0, 10, 25, 40, 100, 150)]
    assert places == pytest.approx([0, 0.1, 0.4, 0.7, 1.0, 1.0])


# over uploads -------------------------------------------------------------------------------------

POINTS = [(0.1, 2, 20.0), (0.1, 8, 30.0), (0.3, 2, 10.0)]


def test_a_chart_has_every_point_and_a_name_for_each_curve() -> None:
    (found,) = uploads_charts(uploads_table(POINTS))
    assert len(titles(found.svg)) == 2 * len(POINTS)  # median and mean
    assert titles(found.svg).count("γ 0.1, uploads 8: 30.0, n=20") == 2
    assert {"γ 0.1 (n=20)", "γ 0.3 (n=20)", "uploads of the same picture"} <= {*texts(found.svg)}
    assert "12.0 dB" in found.caption


@pytest.mark.parametrize(
    "changes",
    [
        {"psnr_median_lo": math.nan, "psnr_mean_hi": math.nan},
        {"grey_mean": math.nan},
        {"psnr_median": math.nan},
        {"psnr_mean": math.inf, "psnr_mean_hi": math.inf},
        {"uploads": 6},
    ],
)
def test_odd_points_do_not_break_the_drawing(changes: dict[str, Any]) -> None:
    (found,) = uploads_charts(uploads_table(POINTS, **changes))
    assert not re.search(r"\b(nan|inf)\b", found.svg)
    assert len(titles(found.svg)) == (3 if "psnr_median" in changes else 6)
    assert ("12.0 dB" in found.caption) == ("grey_mean" not in changes)


def test_panels_of_two_numbers_of_uploads_give_way() -> None:
    long = uploads_table([(0.1, 1, 20.0), (0.1, 2, 20.0), (0.1, 6, 30.0)])
    short = uploads_table([(0.1, 1, 20.0), (0.1, 2, 30.0)], panel=2)
    (found,) = uploads_charts(pd.concat([long, short], ignore_index=True))
    assert "1 more" in found.caption
    assert len(uploads_charts(short)) == 1


@pytest.mark.parametrize(
    "empty", [lambda: uploads_charts(pd.DataFrame()), lambda: distribution_charts([])]
)
def test_nothing_to_show_is_no_chart(empty: Callable[[], tuple[Chart, ...]]) -> None:
    assert empty() == ()
