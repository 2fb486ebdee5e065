"""The curve over the number of uploads: its points by hand, and when there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.metrics.statistics import Share, bootstrap_interval, median_interval
from mjp_privacy.report.charts.curves import batch_points, curve_points, uploads_charts
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.write import write_report
from tests.helpers.ladder_rows import curve_run, simple_line
from tests.helpers.report_rows import cell, image_id, image_rows, intact, write_rows


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


@pytest.mark.parametrize(
    "change",
    [
        *({"dtype": "float64"}, {"augment": "flip"}, {"model": "ViT-S"}, {"setting": "b"}),
        {"attack_options": '{"prior": "free"}'},
    ],
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
    assert len(uploads_charts(points)) == 2


def test_one_number_of_uploads_is_no_curve(tmp_path: Path) -> None:
    """Also where two attacks have different ones; what an earlier report left is removed."""
    store = RunStore(tmp_path / "run")
    entries = [cell("x", attack="x"), cell("y", attack="y", uploads=3)]
    store.write_cells(entries)
    for entry in entries:
        simple_line(store, entry, [20.0])
    (tmp_path / "out/figures").mkdir(parents=True)
    stale = [tmp_path / "out/figures/uploads_1.svg", tmp_path / "out/rounds.csv"]
    for path in (*stale, tmp_path / "out/mine.html"):
        path.touch()
    write_report([tmp_path / "run"], tmp_path / "out")
    assert points_of(tmp_path / "run").empty
    assert not any(path.exists() for path in stale)
    assert (tmp_path / "out/mine.html").exists()


# exact pictures and psnr over the batch -----------------------------------------------------------

IMAGES = 5


def run(folder: Path, *lines: tuple[dict[str, Any], int, float]) -> Path:
    """A run with these lines: columns of the cell, exact pictures, PSNR of the others."""
    store = RunStore(folder)
    entries = [intact(f"line {at}", **changes) for at, (changes, _, _) in enumerate(lines)]
    store.write_cells(entries)
    for entry, (_, exact, others) in zip(entries, lines, strict=True):
        rows = []
        for at in range(IMAGES):
            made = image_rows(entry, image_id(at), 140.0 if at < exact else others + at)
            for row in made:
                if (row["metric"], row["variant"]) == ("psnr", "paper") and at < exact:
                    row["value"] = math.inf
            rows += made
        write_rows(store, entry, rows)
    return folder


def points_of_batches(folder: Path) -> pd.DataFrame:
    return batch_points(load_runs([folder]).lines)


def fresh(batch: int, uploads: int, name: str = "shared_picture", **more: Any) -> dict[str, Any]:
    client = {"batch": batch, "partners": "fresh"}
    return client | {"uploads": uploads, "attack": name, "attack_name": name} | more


SINGLE = {"attack": "alone", "attack_name": "alone"}


def test_points_by_hand_batches(tmp_path: Path) -> None:
    points = points_of_batches(
        run(
            tmp_path,
            (SINGLE, 5, 0.0),
            (fresh(4, 2), 3, 12.0),
            (fresh(4, 1, "batch_span"), 0, 13.0),
            (fresh(8, 2), 1, 10.0),
        )
    )
    assert points["panel"].tolist() == [1] * 4
    assert points[["batch", "uploads"]].values.tolist() == [[1, 1], [4, 1], [4, 2], [8, 2]]
    assert points["attack"].tolist() == ["alone", "batch_span", *["shared_picture"] * 2]
    assert points["exact"].tolist() == [5, 0, 3, 1]
    assert points["n"].tolist() == [IMAGES] * 4
    assert points["psnr_median"].tolist() == [100, 15, 100, 13]
    assert tuple(points.loc[2, ["exact_lo", "exact_hi"]]) == pytest.approx(Share(3, 5).interval)
    assert set(points["differs"]) == {"partners fresh"}


def test_a_point_is_the_attack_that_recovers_most_there(tmp_path: Path) -> None:
    points = points_of_batches(
        run(
            tmp_path,
            (fresh(2, 2), 4, 5.0),
            (fresh(2, 2, "other"), 0, 60.0),
            (fresh(4, 2, "other"), 0, 30.0),
            (fresh(4, 2), 0, 20.0),
        )
    )
    assert points["attack"].tolist() == ["shared_picture", "other"]


def test_clients_that_differ_in_more_than_their_batch_are_panels(tmp_path: Path) -> None:
    """A client of single pictures has no partners: it opens both panels."""
    fixed = {"partners": "fixed"}
    points = points_of_batches(
        run(
            tmp_path,
            (SINGLE, 5, 0.0),
            (fresh(2, 2), 5, 0.0),
            (fresh(2, 1, "batch_span") | fixed, 0, 14.0),
            (fresh(4, 1, "batch_span") | fixed, 0, 13.0),
        )
    )
    by_panel = {n: group["batch"].tolist() for n, group in points.groupby("panel")}
    assert by_panel == {1: [1, 2], 2: [1, 2, 4]}
    differs = points.groupby("panel")["differs"].first().tolist()
    assert differs == ["partners fresh", ""]


def test_controls_altered_models_and_what_does_not_apply_are_no_points(tmp_path: Path) -> None:
    folder = run(
        tmp_path,
        (fresh(2, 2), 1, 10.0),
        (fresh(4, 2, "april") | {"victim": "april_block"}, 5, 10.0),
        (fresh(4, 0, "grey") | {"role": "floor"}, 5, 10.0),
    )
    assert points_of_batches(folder).empty


def test_a_report_has_the_picture_and_its_figures(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", (fresh(2, 2), 4, 5.0), (fresh(4, 2), 1, 20.0))
    write_report([folder], tmp_path / "report")
    table = pd.read_csv(tmp_path / "report" / "batches.csv")
    assert table["exact"].tolist() == [4, 1]
    svg = (tmp_path / "report" / "figures" / "batches_1.svg").read_text()
    assert "batch 2: 80.0, n=5" in svg
    page = (tmp_path / "report" / "index.html").read_text()
    assert "batches.csv" in page
    assert "figures/batches_1.svg" in page


@pytest.mark.parametrize("batch", [1, 2])
def test_a_stored_residual_of_a_batch_does_not_count(tmp_path: Path, batch: int) -> None:
    """Earlier versions computed one, with labels in an order that nobody knows."""
    store = RunStore(tmp_path)
    entry = intact("line", batch=batch)
    store.write_cells([entry])
    rows = image_rows(entry, image_id(0), 20.0, diagnostics={"gradient_residual": 0.5})
    write_rows(store, entry, rows)
    (line,) = load_runs([tmp_path]).lines
    assert line.scored("gradient_residual", "diagnostic").tolist() == ([0.5] if batch == 1 else [])
