"""What every chart is: XML with its hover texts, strangers' words as text, equal bytes again."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, gaussian_kde

from mjp_privacy.core.drawing import COLOURS
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.charts.chart import (
    LIGHTER,
    VARIABLES,
    Chart,
    standalone,
)
from mjp_privacy.report.charts.curves import uploads_charts
from mjp_privacy.report.charts.distributions import (
    curve_of,
    density,
    distribution_charts,
    floor_mean,
    ridge_of,
)
from mjp_privacy.report.charts.tradeoff import TradeoffPoint, tradeoff_chart
from mjp_privacy.report.lines import Line
from tests.helpers.ladder_rows import derived_of, ladder_of, ladder_run, lines_of
from tests.helpers.report_rows import HOSTILE, cell, image_id, image_rows, write_rows

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


def test_a_page_paints_and_a_file_has_colours(tmp_path: Path) -> None:
    for found in made(tmp_path, "name"):
        assert "var(--ink, #1f2933)" in found.svg
        assert "var(" not in standalone(found.svg)
        assert set(re.findall(r"#[0-9a-f]{6}\b", standalone(found.svg))) <= {
            *(*COLOURS, *VARIABLES, *LIGHTER, *LIGHTER.values())
        }


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


@pytest.mark.parametrize(
    "empty", [lambda: uploads_charts(pd.DataFrame()), lambda: distribution_charts([])]
)
def test_nothing_to_show_is_no_chart(empty: Callable[[], tuple[Chart, ...]]) -> None:
    assert empty() == ()


# distributions ------------------------------------------------------------------------------------


def line_of(folder: Path, psnr: list[float | str], **changes: Any) -> Line:
    (line,) = lines_of(ladder_of(folder, (cell("one", **changes), psnr)))
    return line


def at(curve: Any, place: float) -> float:
    """The share of the step that holds at a place."""
    return float(curve.share[np.searchsorted(curve.thresholds, place, side="right") - 1]) / 100


def success(line: Line) -> Any:
    return curve_of(line, "psnr", 0.0, PSNR_CAP)


def test_success_is_the_share_that_reaches_each_threshold(tmp_path: Path) -> None:
    scores: list[float | str] = [12.0, 20.0, 30.0, 45.0, math.inf, "failed", "unsupported"]
    curve = success(line_of(tmp_path, [*scores, "unscored"]))
    assert curve.of == 7
    known = {0: 5, 12: 5, 12.001: 4, 20: 4, 20.001: 3, 30: 3, 44: 2, 45.001: 1, 100: 1}
    for place, count in known.items():
        assert at(curve, place) == pytest.approx(count / 7), place


def test_crops_of_a_photograph_are_not_counted_as_independent(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("one")
    store.write_cells([entry])
    rows = [
        row | {"group": f"photograph {i // 5}"}
        for i in range(20)
        for row in image_rows(entry, image_id(i), 40.0 if i < 10 else 10.0)
    ]
    write_rows(store, entry, rows)
    (line,) = lines_of(tmp_path)
    curve = success(line)
    assert (curve.of, curve.photographs) == (20, 4)
    half = int(np.flatnonzero(curve.share == 50)[0])
    alone = binomtest(10, 20).proportion_ci(method="wilson")
    assert curve.high[half] - curve.low[half] > 130 * (alone.high - alone.low)
    assert "crops of one photograph" in distribution_charts([("a", line)])[0].caption


def test_the_share_of_lpips_grows_and_of_ssim_falls_as_more_is_asked(tmp_path: Path) -> None:
    line = line_of(tmp_path, [20.0, 40.0, 60.0, "failed"])  # LPIPS .1, .01, .001
    curve = curve_of(line, "lpips", 0.0, 1.0, smaller=True)
    steps = {0.0: 0, 0.0011: 0.25, 0.0099: 0.25, 0.011: 0.5, 0.099: 0.5, 0.101: 0.75, 5.0: 0.75}
    for place, share in steps.items():
        assert at(curve, place) == share, place
    line = line_of(tmp_path / "ssim", [10.0, 20.0, "failed"])  # SSIM .9, .99
    curve = curve_of(line, "ssim", 0.0, 1.0)
    assert [at(curve, x) for x in (0.0, 0.9, 0.95, 1.0)] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 0])


# drawn --------------------------------------------------------------------------------------------


def test_a_step_is_drawn_where_it_belongs(tmp_path: Path) -> None:
    """Half of the images fall out at 20 dB: the curve goes from 100 % to 50 % right there."""
    line = line_of(tmp_path, [20.0, math.inf])
    svg = distribution_charts([("a", line)])[0].svg
    place = r'<text [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*>'
    (twenty,) = [float(x) for x, _ in re.findall(place + "20</text>", svg)]
    bottom, top = (float(re.findall(place + f"{share} %</text>", svg)[0][1]) for share in (0, 100))
    outline = re.search(r'<path d="M ([^"]+)"[^>]*stroke-width: 1.8', svg)
    assert outline is not None
    corners = [tuple(map(float, corner.split())) for corner in outline.group(1).split(" L ")]
    drop = [(a, b) for a, b in pairwise(corners) if b[1] > a[1] + 1]
    ((start, end),) = drop
    assert (start[0], end[0]) == pytest.approx((twenty, twenty), abs=0.2)
    assert end[1] - start[1] == pytest.approx((bottom - top) / 2, abs=0.2)


def test_three_charts_name_every_line(tmp_path: Path) -> None:
    ladder_run(tmp_path)
    attacks = [line for line in lines_of(tmp_path) if line.role == "attack"]
    every = [*attacks, *derived_of(tmp_path).values()]
    named = [(f"line {line.number} of a <long> name" + 80 * "x", line) for line in every]
    charts = distribution_charts(named)
    assert [chart.name for chart in charts] == ["success", "lpips", "spread"]
    for one in charts:
        for name, line in named:
            assert any(title.startswith(name) for title in titles(one.svg))
            assert any(text.startswith(f"line {line.number} of") for text in texts(one.svg))
    assert "11.0 dB" in charts[0].caption
    assert floor_mean(attacks) == pytest.approx(11.0)


@pytest.mark.parametrize(
    ("scores", "count"),
    [
        (["unscored"], 0),
        (["failed", "unsupported"], 1),
        ([15.0], 3),
        ([math.inf, math.inf, "failed"], 3),
        ([math.nan, 20.0], 3),
        ([-3.0, 0.0, 5.0], 3),
        ([20.0] * 5, 3),
    ],
)
def test_odd_lines_do_not_break(tmp_path: Path, scores: list[float | str], count: int) -> None:
    charts = distribution_charts([("a", line_of(tmp_path, scores))])
    assert len(charts) == count
    for one in charts:
        ElementTree.fromstring(one.svg)
        assert not re.search(r"\b(nan|inf)\b", one.svg)


# ridges -------------------------------------------------------------------------------------------


def test_a_ridge_counts_exact_and_lost_images(tmp_path: Path) -> None:
    ridge = ridge_of(line_of(tmp_path, [10.0, 110.0, math.inf, math.inf, "failed"]))
    assert (ridge.exact, ridge.tried) == (2, 5)
    assert sorted(ridge.values) == [10.0, PSNR_CAP, PSNR_CAP, PSNR_CAP]
    assert sorted(ridge.inexact) == [10.0, PSNR_CAP]
    assert ridge.words == "n=4, 1 not recovered, 2 of 5 exact"


def test_a_density_is_that_of_kernels_along_the_axis(tmp_path: Path) -> None:
    """Against scipy's kernels, where the axis is straight and nothing reaches its ends."""
    values = np.random.default_rng(0).normal(24, 2, 4000)
    psnr, heights = density(values)
    spread = min(values.std(), np.subtract(*np.quantile(values, [0.75, 0.25])) / 1.34)
    wide = 0.7 * spread * len(values) ** -0.2
    kernels = gaussian_kde(values, wide / values.std(ddof=1))(psnr)
    assert np.abs(heights - kernels / kernels.max()).max() < 0.01
