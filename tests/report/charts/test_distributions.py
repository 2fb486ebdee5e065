"""Distributions: shares, densities and counts against known scores, and odd lines."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, gaussian_kde

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.charts.distributions import (
    MOST,
    MOST_STEPS,
    curve_of,
    density,
    distribution_charts,
    floor_mean,
    ridge_of,
)
from mjp_privacy.report.lines import Line
from mjp_privacy.report.rows import CellScores
from tests.helpers.ladder_rows import derived_of, ladder_of, ladder_run, lines_of, simple_line
from tests.helpers.report_rows import cell, image_id, image_rows, small_run, write_rows
from tests.report.charts.test_chart import texts, titles


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


def test_many_images_are_thinned_and_still_true(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(5, 50, 600)
    curve = success(line_of(tmp_path, values.tolist()))
    assert len(curve.thresholds) <= MOST_STEPS
    for place, share in zip(curve.thresholds, curve.share, strict=True):
        assert share == pytest.approx(100 * (values >= place).mean())


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
    for chart in charts:
        for name, line in named:
            assert any(title.startswith(name) for title in titles(chart.svg))
            assert any(text.startswith(f"line {line.number} of") for text in texts(chart.svg))
    assert "11.0 dB" in charts[0].caption
    assert floor_mean(attacks) == pytest.approx(11.0)


def test_lines_beyond_the_colours_are_counted(tmp_path: Path) -> None:
    entries = [(cell(f"c{i}", attack=f"attack {i}"), [10.0, 20.0]) for i in range(MOST + 3)]
    lines = lines_of(ladder_of(tmp_path, *entries))
    charts = distribution_charts([(line.attack, line) for line in lines])
    assert all("3 more lines" in chart.caption for chart in charts)
    assert "attack 11" in texts(charts[0].svg)
    assert "attack 12" not in charts[0].svg


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
    for chart in charts:
        ElementTree.fromstring(chart.svg)
        assert not re.search(r"\b(nan|inf)\b", chart.svg)


def rows_of(line: Line) -> pd.DataFrame:
    return line.store.read(line.run_id)


def other_rows(line: Line, rows: pd.DataFrame) -> Line:
    return Line(line.number, line.run, line.cell, CellScores.of_table(rows), line.store)


def test_without_rows_there_is_no_chart_and_without_lpips_ssim_stands_in(tmp_path: Path) -> None:
    line = line_of(tmp_path, [10.0, 20.0])
    rows = rows_of(line)
    assert distribution_charts([("a", other_rows(line, rows.head(0)))]) == ()
    rows = rows.drop(columns=["lpips.standard", "lpips.paper"])
    charts = distribution_charts([("a", other_rows(line, rows))])
    assert [chart.name for chart in charts] == ["success", "ssim", "spread"]
    rows = rows.drop(columns=["ssim.standard", "ssim.paper"])
    charts = distribution_charts([("a", other_rows(line, rows))])
    assert [chart.name for chart in charts] == ["success", "spread"]


# ridges -------------------------------------------------------------------------------------------


def test_a_ridge_counts_exact_and_lost_images(tmp_path: Path) -> None:
    ridge = ridge_of(line_of(tmp_path, [10.0, 110.0, math.inf, math.inf, "failed"]))
    assert (ridge.exact, ridge.tried) == (2, 5)
    assert sorted(ridge.values) == [10.0, PSNR_CAP, PSNR_CAP, PSNR_CAP]
    assert sorted(ridge.inexact) == [10.0, PSNR_CAP]
    assert ridge.words == "n=4, 1 not recovered, 2 of 5 exact"


def test_exact_means_equal_in_8_bits(tmp_path: Path) -> None:
    """Exactness is read from the 8-bit variant, whatever the standard PSNR is."""
    store = RunStore(tmp_path)
    entry = cell("one")
    store.write_cells([entry])
    rows = []
    for i, (standard, in_8_bits) in enumerate([(65.0, math.inf), (60.0, 58.0)]):
        for row in image_rows(entry, image_id(i), standard):
            exact = row["metric"] == "psnr" and row["variant"] == "paper"
            rows.append(row | ({"value": in_8_bits} if exact else {}))
    write_rows(store, entry, rows)
    (line,) = lines_of(tmp_path)
    ridge = ridge_of(line)
    assert ridge.exact == 1
    assert ridge.inexact.tolist() == [60.0]
    assert any("1 of 2" in text for text in texts(distribution_charts([("a", line)])[-1].svg))


def test_a_density_peaks_where_the_values_are() -> None:
    generator = np.random.default_rng(0)
    values = np.concatenate([generator.normal(15, 0.6, 60), generator.normal(28, 0.6, 30)])
    psnr, heights = density(values)
    assert heights.max() == pytest.approx(1, abs=0.01)
    assert abs(psnr[heights.argmax()] - 15) < 0.6
    assert heights[(psnr > 20) & (psnr < 24)].max(initial=0) < 0.1
    assert 0.3 < heights[psnr > 24].max() < 0.7
    assert (heights >= 0).all()
    assert (np.diff(psnr) > 0).all()


@pytest.mark.parametrize("values", [[], [25.0], [25.0] * 4, [0.0], [100.0]])
def test_a_density_of_few_or_equal_values(values: list[float]) -> None:
    psnr, heights = density(np.array(values))
    assert len(psnr) == 0 if not values else abs(psnr[heights.argmax()] - values[0]) < 1.5


def test_a_density_is_that_of_kernels_along_the_axis(tmp_path: Path) -> None:
    """Against scipy's kernels, where the axis is straight and nothing reaches its ends."""
    values = np.random.default_rng(0).normal(24, 2, 4000)
    psnr, heights = density(values)
    spread = min(values.std(), np.subtract(*np.quantile(values, [0.75, 0.25])) / 1.34)
    wide = 0.7 * spread * len(values) ** -0.2
    kernels = gaussian_kde(values, wide / values.std(ddof=1))(psnr)
    assert np.abs(heights - kernels / kernels.max()).max() < 0.01


def test_one_small_run_draws(tmp_path: Path) -> None:
    (line,) = lines_of(small_run(tmp_path / "run"))
    assert len(distribution_charts([("a", line)])) == 3
    store = RunStore(tmp_path / "empty")
    store.write_cells([cell("none"), cell("other", attack="grey")])
    simple_line(store, cell("other", attack="grey"), [10.0])
    lines = lines_of(tmp_path / "empty")
    assert len(distribution_charts([(line.attack, line) for line in lines])) == 3
