"""The curve over uploads: points where the figures are, bands, floor, odd tables."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.report.charts.uploads_curve import uploads_charts
from mjp_privacy.report.points import curve_points
from mjp_privacy.report.runs import load_runs
from tests.helpers.ladder_rows import curve_run
from tests.helpers.report_rows import HOSTILE

SVG = "{http://www.w3.org/2000/svg}"


def points_of(folder: Path, *gammas: float) -> pd.DataFrame:
    curve_run(folder, gammas or (0.09, 0.27))
    return curve_points(load_runs([folder]).lines)


def test_a_run_gives_a_chart_with_a_curve_for_each_gamma(tmp_path: Path) -> None:
    (chart,) = uploads_charts(points_of(tmp_path))
    root = ElementTree.fromstring(chart.svg)
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert [texts.count(label) for label in ("γ 0.09", "γ 0.27", "floor", "uploads")] == [2] * 4
    assert "11.0 dB" in chart.caption
    assert "Images: 5." in chart.caption
    told = [title.text or "" for title in root.iter(f"{SVG}title")]
    middle = 12.0 / 1.27 + 2
    assert told.count(f"γ 0.27, 1 uploads: {middle:.1f} dB, n=5") == 2  # median equals mean here
    assert any("4 uploads: 100.0 dB" in text for text in told)


def test_points_stand_where_their_figures_are() -> None:
    """Over 1, 2, 4 uploads each doubling is as wide as the other; 0 to 100 dB is linear."""
    (chart,) = uploads_charts(table([(0.3, 1, 0.0), (0.3, 2, 50.0), (0.3, 4, 100.0)]))
    lines = re.findall(r'<path d="([^"]+)"[^>]*stroke-width="1.8"', chart.svg)
    assert len(lines) == 2  # median and mean
    corners = [tuple(map(float, c.split())) for c in re.split("[ML]", lines[0]) if c]
    assert corners[1][0] - corners[0][0] == pytest.approx(corners[2][0] - corners[1][0], abs=0.2)
    assert corners[0][1] - corners[1][1] == pytest.approx(corners[1][1] - corners[2][1], abs=0.2)
    assert corners[2][1] < corners[0][1]


def table(rows: list[tuple[float, int, float]], **changes: object) -> pd.DataFrame:
    """Points of one panel: (γ, uploads, PSNR)."""
    known: dict[str, object] = {
        **{"model": "ViT", "setting": "c", "dtype": "float32", "attack": "multi_round"},
        **{"options": "", "differs": "", "n": 20, "panel": 1, "grey_mean": 12.0},
    }
    records = []
    for gamma, uploads, psnr in rows:
        record: dict[str, object] = {"gamma": gamma, "uploads": uploads}
        for name in ("median", "mean"):
            record |= {f"psnr_{name}": psnr, f"psnr_{name}_lo": psnr - 1}
            record |= {f"psnr_{name}_hi": psnr + 1}
        records.append(known | record | changes)
    return pd.DataFrame(records)


def test_no_points_no_chart(tmp_path: Path) -> None:
    assert uploads_charts(pd.DataFrame()) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"psnr_median_lo": math.nan, "psnr_mean_hi": math.nan},
        {"grey_mean": math.nan},
        {"psnr_median": math.nan},
        {"psnr_mean": math.inf, "psnr_mean_hi": math.inf},
        {"model": HOSTILE, "options": HOSTILE * 5},
    ],
)
def test_odd_points_do_not_break_the_drawing(changes: dict[str, object]) -> None:
    (chart,) = uploads_charts(table([(0.1, 2, 20.0), (0.1, 8, 30.0), (0.3, 2, 10.0)], **changes))
    root = ElementTree.fromstring(chart.svg)
    assert f"{SVG}script" not in {element.tag for element in root.iter()}
    assert "nan" not in chart.svg
    floor = "grey_mean" not in changes
    assert ("floor" in chart.svg) == floor


def test_one_number_of_uploads_is_a_point() -> None:
    (chart,) = uploads_charts(table([(0.1, 6, 20.0)]))
    ElementTree.fromstring(chart.svg)


def test_panels_of_two_numbers_of_uploads_give_way() -> None:
    long = table([(0.1, 1, 20.0), (0.1, 2, 20.0), (0.1, 6, 30.0)])
    short = table([(0.1, 1, 20.0), (0.1, 2, 30.0)], panel=2)
    (chart,) = uploads_charts(pd.concat([long, short], ignore_index=True))
    assert "1 more" in chart.caption
    assert len(uploads_charts(short)) == 1
