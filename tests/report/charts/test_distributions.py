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
from scipy.stats import binomtest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.report.charts.curves import MOST_STEPS, ecdf, success
from mjp_privacy.report.charts.distributions import MOST, distribution_charts, floor_mean
from mjp_privacy.report.charts.names import short_names
from mjp_privacy.report.charts.ridges import density, ridge_of
from mjp_privacy.report.lines import Line
from mjp_privacy.report.rows import CellScores
from tests.helpers.ladder_rows import derived_of, ladder_of, ladder_run, lines_of, simple_line
from tests.helpers.report_rows import HOSTILE, cell, image_id, image_rows, small_run, write_rows

SVG = "{http://www.w3.org/2000/svg}"
LABELLED = re.compile(r"<text [^>]*>(?:<title>[^<]*</title>)?([^<]*)</text>")


def line_of(folder: Path, psnr: list[float | str], **changes: Any) -> Line:
    (line,) = lines_of(ladder_of(folder, (cell("one", **changes), psnr)))
    return line


def at(curve: Any, place: float) -> float:
    """The share of the step that holds at a place."""
    return float(curve.shares[np.searchsorted(curve.places, place, side="right") - 1])


def test_success_is_the_share_that_reaches_each_threshold(tmp_path: Path) -> None:
    scores: list[float | str] = [12.0, 20.0, 30.0, 45.0, math.inf, "failed", "unsupported"]
    curve = success(line_of(tmp_path, [*scores, "unscored"]))
    assert curve is not None
    assert curve.n == 7
    known = {0: 5, 12: 5, 12.001: 4, 20: 4, 20.001: 3, 30: 3, 44: 2, 45.001: 1, 100: 1}
    for place, count in known.items():
        assert at(curve, place) == pytest.approx(count / 7), place


def test_bands_are_wilsons(tmp_path: Path) -> None:
    curve = success(line_of(tmp_path, [10.0, 20.0, 30.0, 40.0]))
    assert curve is not None
    for share, low, high in zip(curve.shares, curve.low, curve.high, strict=True):
        expected = binomtest(round(share * 4), 4).proportion_ci(method="wilson")
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-6)


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
    assert curve is not None
    assert (curve.n, curve.photographs) == (20, 4)
    half = int(np.flatnonzero(curve.shares == 0.5)[0])
    alone = binomtest(10, 20).proportion_ci(method="wilson")
    assert curve.high[half] - curve.low[half] > 1.3 * (alone.high - alone.low)
    assert "crops of one photograph counted together" in distribution_charts([line])[0].caption


def test_the_ecdf_of_lpips_by_hand(tmp_path: Path) -> None:
    line = line_of(tmp_path, [20.0, 40.0, 60.0, "failed"])  # LPIPS .1, .01, .001
    curve = ecdf(line, "lpips", smaller=True)
    assert curve is not None
    assert at(curve, 0.0) == 0
    steps = {0.0011: 0.25, 0.0099: 0.25, 0.011: 0.5, 0.099: 0.5, 0.101: 0.75, 5.0: 0.75}
    for place, share in steps.items():
        assert at(curve, place) == share, place


def test_the_share_of_ssim_falls_as_more_is_asked(tmp_path: Path) -> None:
    line = line_of(tmp_path, [10.0, 20.0, "failed"])  # SSIM .9, .99
    curve = ecdf(line, "ssim", smaller=False)
    assert curve is not None
    assert [at(curve, x) for x in (0.0, 0.9, 0.95, 1.0)] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 0])


@pytest.mark.nightly
def test_many_images_are_thinned_and_still_true(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(5, 50, 600)
    curve = success(line_of(tmp_path, values.tolist()))
    assert curve is not None
    assert len(curve.places) <= MOST_STEPS + 1
    for place, share in zip(curve.places, curve.shares, strict=True):
        assert share == pytest.approx((values >= place).mean())


# drawn --------------------------------------------------------------------------------------------


def test_a_step_is_drawn_where_it_belongs(tmp_path: Path) -> None:
    """Half of the images fall out at 20 dB: the curve goes from 100 % to 50 % right there."""
    line = line_of(tmp_path, [20.0, math.inf])
    chart = distribution_charts([line])[0]
    ticks = dict(re.findall(r'<text x="([\d.]+)"[^>]*>(\d+)</text>', chart.svg))
    twenty = next(float(x) for x, text in ticks.items() if text == "20")
    outline = re.search(r'<path d="([^"]+)"[^>]*stroke-width="1.8"', chart.svg)
    assert outline is not None
    corners = [tuple(map(float, c.split())) for c in re.split("[ML]", outline.group(1)) if c]
    drops = [(a, b) for a, b in pairwise(corners) if a[0] == b[0] and b[1] > a[1]]
    (drop,) = drops
    assert drop[0][0] == pytest.approx(twenty, abs=0.11)
    bottom = next(float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>0 %<', chart.svg)) - 4
    top = next(float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>100 %<', chart.svg)) - 4
    assert drop[0][1] == pytest.approx(top, abs=0.11)
    assert drop[1][1] == pytest.approx((top + bottom) / 2, abs=0.11)


def test_three_charts_name_every_line(tmp_path: Path) -> None:
    ladder_run(tmp_path)
    attacks = [line for line in lines_of(tmp_path) if line.role == "attack"]
    derived = list(derived_of(tmp_path).values())
    charts = distribution_charts(attacks, derived)
    assert [chart.name for chart in charts] == ["success", "lpips", "spread"]
    names = {"april", "patch_gradient", "masked_span", "best, 1 upload"}
    for chart in charts:
        assert names <= set(LABELLED.findall(chart.svg))
        assert ElementTree.fromstring(chart.svg).get("role") == "img"
    assert "11.0 dB" in charts[0].caption
    assert floor_mean(attacks) == pytest.approx(11.0)


def test_given_names_are_used(tmp_path: Path) -> None:
    line = line_of(tmp_path, [10.0, 20.0])
    for chart in distribution_charts([line], names={line.number: "the best one"}):
        assert "the best one" in LABELLED.findall(chart.svg)


def test_lines_beyond_the_colours_are_counted(tmp_path: Path) -> None:
    entries = [(cell(f"c{i}", attack=f"attack {i}"), [10.0, 20.0]) for i in range(MOST + 3)]
    charts = distribution_charts(lines_of(ladder_of(tmp_path, *entries)))
    assert all("3 more lines are in the tables" in chart.caption for chart in charts)
    assert "attack 11" in charts[0].svg
    assert "attack 12" not in charts[0].svg


@pytest.mark.parametrize(
    ("scores", "count"),
    [
        (["unscored"], 0),
        (["failed", "unsupported"], 1),
        ([15.0], 3),
        ([math.inf], 3),
        ([math.inf, math.inf, "failed"], 3),
        ([math.nan, 20.0], 3),
        ([-3.0, 0.0, 5.0], 3),
        ([20.0] * 5, 3),
    ],
)
def test_odd_lines_do_not_break(tmp_path: Path, scores: list[float | str], count: int) -> None:
    charts = distribution_charts([line_of(tmp_path, scores)])
    assert len(charts) == count
    for chart in charts:
        ElementTree.fromstring(chart.svg)
        assert "nan" not in chart.svg


def rows_of(line: Line) -> pd.DataFrame:
    return line.store.read(line.run_id)


def test_without_rows_there_is_no_chart(tmp_path: Path) -> None:
    line = line_of(tmp_path, [10.0])
    empty = Line(
        line.number, line.run, line.cell, CellScores.of_table(rows_of(line).head(0)), line.store
    )
    assert distribution_charts([empty]) == distribution_charts([]) == ()


def test_without_lpips_ssim_stands_in(tmp_path: Path) -> None:
    line = line_of(tmp_path, [10.0, 20.0])
    rows = rows_of(line).drop(columns=["lpips.standard", "lpips.paper"])
    other = Line(line.number, line.run, line.cell, CellScores.of_table(rows), line.store)
    assert [chart.name for chart in distribution_charts([other])] == ["success", "ssim", "spread"]
    rows = rows.drop(columns=["ssim.standard", "ssim.paper"])
    other = Line(line.number, line.run, line.cell, CellScores.of_table(rows), line.store)
    assert [chart.name for chart in distribution_charts([other])] == ["success", "spread"]


def test_hostile_names_are_escaped_and_shown_whole_on_hover(tmp_path: Path) -> None:
    long = HOSTILE + "x" * 80
    entries = [
        (cell(f"c{i}", model=HOSTILE, attack=long + str(i)), [10.0, math.inf]) for i in (0, 1)
    ]
    for chart in distribution_charts(lines_of(ladder_of(tmp_path, *entries))):
        root = ElementTree.fromstring(chart.svg)
        assert f"{SVG}script" not in {element.tag for element in root.iter()}
        titles = [title.text or "" for title in root.iter(f"{SVG}title")]
        assert any(long + "0" in title for title in titles)
        shown = ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]
        assert any("…" in text for text in shown)


# ridges -------------------------------------------------------------------------------------------


def test_a_ridge_counts_exact_and_lost_images(tmp_path: Path) -> None:
    ridge = ridge_of(line_of(tmp_path, [10.0, 110.0, math.inf, math.inf, "failed"]), "name")
    assert (ridge.exact, ridge.tried) == (2, 5)
    assert sorted(ridge.values) == [10.0, PSNR_CAP, PSNR_CAP, PSNR_CAP]
    assert sorted(ridge.inexact) == [10.0, PSNR_CAP]
    assert ridge.n_text == "n=4, 1 not recovered"


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
    ridge = ridge_of(line, "name")
    assert ridge.exact == 1
    assert ridge.inexact.tolist() == [60.0]
    chart = distribution_charts([line])[-1]
    assert "1 of 2" in LABELLED.findall(chart.svg)


def test_a_density_peaks_where_the_values_are() -> None:
    generator = np.random.default_rng(0)
    places = np.concatenate([generator.normal(200, 8, 60), generator.normal(400, 8, 30)])
    grid, heights = density(places, 100, 600).T
    assert heights.max() == 1
    assert abs(grid[heights.argmax()] - 200) < 8
    between = heights[(grid > 280) & (grid < 320)].max()
    second = heights[grid > 320].max()
    assert between < 0.1
    assert 0.3 < second < 0.7
    assert (heights >= 0).all()
    assert (np.diff(grid) >= 0).all()


@pytest.mark.parametrize("places", [[], [300.0], [300.0] * 4])
def test_a_density_of_few_or_equal_values(places: list[float]) -> None:
    found = density(np.array(places), 100, 600)
    assert len(found) == 0 if not places else abs(found[found[:, 1].argmax(), 0] - 300) < 2


# names --------------------------------------------------------------------------------------------


def test_names_say_what_differs_and_are_unique(tmp_path: Path) -> None:
    shared = {"setting": "b", "gamma": 0.27}
    entries: list[tuple[dict[str, Any], list[float | str]]] = [
        (cell("1", attack="april", **shared), [10.0]),
        (cell("2", attack="april", setting="c", gamma=0.5), [10.0]),
        (cell("3", attack="grey", **shared), [10.0]),
        (cell("4", attack="grey", **shared), [10.0]),
    ]
    names = short_names(lines_of(ladder_of(tmp_path, *entries)))
    assert names[:2] == ["(b) γ .27 april", "(c) γ .5 april"]
    assert names[2:] == ["(b) γ .27 grey (line 3)", "(b) γ .27 grey (line 4)"]
    assert short_names([]) == []


def test_one_small_run_draws(tmp_path: Path) -> None:
    (line,) = lines_of(small_run(tmp_path / "run"))
    assert len(distribution_charts([line])) == 3
    store = RunStore(tmp_path / "empty")
    entry = cell("none")
    store.write_cells([entry, cell("other", attack="grey")])
    simple_line(store, cell("other", attack="grey"), [10.0])
    assert len(distribution_charts(lines_of(tmp_path / "empty"))) == 3
