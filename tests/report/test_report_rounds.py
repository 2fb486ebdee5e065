"""The curve over the number of uploads: its points by hand, and when there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.statistics import bootstrap_interval, median_interval
from mjp_privacy.report.charts.curves import curve_points, write_rounds
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.write import write_report
from tests.helpers.ladder_rows import curve_run, simple_line
from tests.helpers.report_rows import cell, image_id, image_rows, write_rows


def points_of(folder: Path) -> pd.DataFrame:
    return curve_points(load_runs([folder]).lines)


def test_points_by_hand(tmp_path: Path) -> None:
    curve_run(tmp_path, (0.27, 0.09))
    points = points_of(tmp_path)
    assert points["attack"].unique().tolist() == ["multi_round"]
    assert points["uploads"].tolist() == [1, 2, 4, 1, 2, 4]
    assert points["gamma"].tolist() == [0.09] * 3 + [0.27] * 3
    assert points["panel"].tolist() == [1] * 6
    values = 60.0 + 12.0 / 1.27 + np.arange(5)
    point = points.iloc[4]
    assert point["psnr_mean"] == pytest.approx(values.mean())
    assert point["psnr_median"] == pytest.approx(np.median(values))
    assert (point["psnr_mean_lo"], point["psnr_mean_hi"]) == bootstrap_interval(values)
    assert (point["psnr_median_lo"], point["psnr_median_hi"]) == median_interval(values)
    assert (point["n"], point["psnr_from_20"], point["psnr_from_30"]) == (5, 100.0, 100.0)
    assert (point["grey_mean"], point["ceiling_mean"]) == (11.0, 40.0)
    assert point["psnr_exact"] == 0
    capped = points.iloc[5]  # 180 dB and more
    assert capped[["psnr_mean", "psnr_median", "psnr_median_hi"]].tolist() == [100.0] * 3


def test_exact_is_equal_in_every_8_bit_value(tmp_path: Path) -> None:
    """Which the rows in the paper's variant say, and not those of unrounded pictures."""
    store = RunStore(tmp_path)
    cells = [cell(str(n), attack=f"R={n}", attack_name="r", uploads=n) for n in (1, 2)]
    store.write_cells(cells)
    for entry in cells:
        rows = [row for i in range(3) for row in image_rows(entry, image_id(i), 60.0 + i)]
        for made in rows:
            if (made["metric"], made["variant"]) == ("psnr", "paper") and entry["uploads"] == 2:
                made["value"] = math.inf if made["image_id"] != image_id(0) else 60.0
        write_rows(store, entry, rows)
    assert points_of(tmp_path)["psnr_exact"].tolist() == [0, 2]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "change",
    [{"dtype": "float64"}, {"augment": "flip"}, {"model": "ViT-S"}, {"setting": "b"}],
)
def test_what_a_curve_must_not_mix_has_a_panel_of_its_own(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    store = RunStore(tmp_path)
    shared: dict[str, Any] = {"setting": "c", "gamma": 0.27, "attack_name": "multi_round"}
    cells = [
        cell(f"{n} {len(own)}", attack=f"R={n}", uploads=n, **shared | own)
        for own in ({}, change)
        for n in (1, 2)
    ]
    store.write_cells(cells)
    for entry in cells:
        simple_line(store, entry, [20.0, 30.0])
    points = points_of(tmp_path)
    assert points["panel"].tolist() == [1, 1, 2, 2]
    if "augment" in change:
        assert points["differs"].tolist() == ["", "", "augment flip", "augment flip"]
    assert write_rounds(points, tmp_path / "rounds.png")


def test_options_other_than_the_uploads_part_curves(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    cells = [
        cell(
            *(f"{n} {prior}",),
            **{"attack": f"{n} {prior}", "attack_name": "multi_round", "uploads": n},
            attack_options=f'{{"uploads": {n}, "prior": "{prior}"}}',
        )
        for prior in ("free", "fitted")
        for n in (2, 3)
    ]
    store.write_cells(cells)
    for entry in cells:
        simple_line(store, entry, [20.0, 30.0])
    points = points_of(tmp_path)
    assert points["panel"].tolist() == [1, 1, 2, 2]
    assert points["options"].tolist() == ["prior=free"] * 2 + ["prior=fitted"] * 2


def test_picture_and_numbers_are_part_of_the_report(tmp_path: Path) -> None:
    curve_run(tmp_path / "run")
    summary = write_report([tmp_path / "run"], tmp_path / "out")
    figure, numbers = tmp_path / "out/figures/rounds.png", tmp_path / "out/rounds.csv"
    assert {figure, numbers} <= set(summary.files)
    assert matplotlib.image.imread(figure)[..., :3].std() > 0.05
    assert pd.read_csv(numbers)["psnr_mean"].tolist() == pytest.approx(
        points_of(tmp_path / "run")["psnr_mean"].tolist()
    )
    assert "figures/rounds.png" in (tmp_path / "out/index.html").read_text()


def test_one_number_of_uploads_is_no_curve(tmp_path: Path) -> None:
    """Also where two attacks have different ones; what an earlier report left is removed."""
    store = RunStore(tmp_path / "run")
    entries = [cell("x", attack="x"), cell("y", attack="y", uploads=3)]
    store.write_cells(entries)
    for entry in entries:
        simple_line(store, entry, [20.0])
    (tmp_path / "out/figures").mkdir(parents=True)
    stale = [tmp_path / "out/figures/rounds.png", tmp_path / "out/rounds.csv"]
    for path in stale:
        path.touch()
    write_report([tmp_path / "run"], tmp_path / "out")
    assert points_of(tmp_path / "run").empty
    assert not any(path.exists() for path in stale)


def test_lines_without_a_score_are_not_on_the_curve(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    cells = [cell(str(n), attack=f"R={n}", attack_name="r", uploads=n) for n in (1, 2, 3)]
    store.write_cells(cells)
    for entry, psnr in zip(cells, ([20.0, "failed"], ["failed"] * 2, [30.0] * 2), strict=True):
        simple_line(store, entry, psnr)
    points = points_of(tmp_path)
    assert points["uploads"].tolist() == [1, 3]
    assert points["n_not_scored"].tolist() == [1, 0]
