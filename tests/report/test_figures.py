"""The figures of a made-up run, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import clients_of, derived_lines
from mjp_privacy.report.lines import Line
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.tables.details import regions_table
from mjp_privacy.report.tables.text import DASH, main_table
from mjp_privacy.report.write import ReportSummary, write_report
from tests.helpers.ladder_rows import curve_run
from tests.helpers.report_rows import (
    build_table,
    cell,
    frame,
    image_id,
    image_rows,
    intact,
    only_line,
    small_run,
    write_rows,
)


@pytest.mark.parametrize(
    ("facts", "comparable"),
    [
        ({}, True),
        ({"architecture": "vit d384 l12 h6 p16@224"}, True),
        ({"data_is_papers": False}, False),
        ({"size": 192}, False),
        ({"architecture": "vit d192 l12 h3 p16@224"}, False),
        ({"architecture": "vit_tiny_patch16_224"}, False),
        ({"architecture": None}, False),
        ({"role": "floor", "attack": "grey"}, False),
        ({"paper_row": None}, False),
    ],
)
def test_the_papers_figures_stand_beside_its_images_model_and_size_only(
    tmp_path: Path, facts: dict[str, Any], comparable: bool
) -> None:
    paper = {"model": "DeiT-S", "setting": "a"}
    store = RunStore(tmp_path)
    entry = cell("x", **{"paper_row": paper, "data_is_papers": True, **facts})
    store.write_cells([entry])
    write_rows(store, entry, image_rows(entry, image_id(0), 20.0, top1={"intact": 1.0}))
    row = build_table([only_line(tmp_path)], "paper").frame.iloc[0]
    mse = 1.01 * 10**-2
    if comparable:
        assert (row["paper_row"], row["acc_paper"], row["mse_paper"]) == (
            "(1) DeiT-S a",
            79.8,
            0.035,
        )
        assert row["acc_difference"] == pytest.approx(100 - 79.8)
        assert row["mse_difference"] == pytest.approx(mse - 0.035)
    else:
        assert row["paper_row"] is None
        beside = [name for name in row.index if name.endswith(("_paper", "_difference"))]
        assert len(beside) == 12
        assert row[beside].isna().all()


def test_the_rank_ceiling_stands_beside_attacks_that_it_bounds(tmp_path: Path) -> None:
    names = ("april", "april_unk_aware", "patch_gradient", "masked_span", "unheard of")
    cells = [cell(name, attack=f"a label of {name}", attack_name=name) for name in names]
    cells.append(cell("oracle_inverse", attack="oracle_inverse", role="ceiling"))
    store = RunStore(tmp_path)
    store.write_cells(cells)
    for entry in cells:
        rows = image_rows(entry, image_id(0), 15.0, diagnostics={"ceiling_psnr": 24.0})
        write_rows(store, entry, rows)
    frame = build_table(load_runs([tmp_path]).lines, "standard").frame.set_index("run_id")
    for name in ("april", "april_unk_aware", "oracle_inverse"):
        assert frame.loc[name, ["ceiling_mean", "ceiling_n", "ceiling_distance"]].tolist() == [
            *(24.0, 1, 9.0)
        ]
    for name in ("patch_gradient", "masked_span", "unheard of"):
        assert frame.loc[name, ["ceiling_mean", "ceiling_distance"]].isna().all()
        assert frame.loc[name, "ceiling_n"] == 0


def test_lines_without_figures_say_why(written: tuple[Path, ReportSummary]) -> None:
    table = frame(written[0], "paper")
    assert list(table["line"]) == list(range(1, 9))
    assert table.loc["unsupported", ["status", "reason"]].tolist() == [
        *("unsupported", "needs N + 1 <= D")
    ]
    assert table.loc["interrupted", "status"] == "failed"
    assert "no rows stored" in table.loc["interrupted", "reason"]
    assert table.loc["unscored", ["n", "n_unscored"]].tolist() == [0, 5]
    assert math.isnan(table.loc["unscored", "acc_mean"])
    assert table.loc["all-failed", ["n", "n_failed"]].tolist() == [0, 4]
    assert table.loc["all-failed", "reason"] == "the gradient is not finite"
    assert table.loc["single", "n"] == 1
    assert math.isnan(table.loc["single", "psnr_lo"])
    markdown = (written[0] / "table.md").read_text()
    assert "| 9.50 [–] |" in markdown
    assert "unsupported: needs N + 1 &lt;= D |" in markdown
    assert "2 images failed: lstsq did not converge" in markdown
    assert "5 images unscored: no truth: a recorded upload" in markdown


def test_runs_are_concatenated(tmp_path: Path) -> None:
    first, second = small_run(tmp_path / "one"), small_run(tmp_path / "two", dtype="float64")
    write_report([second, first], tmp_path / "out")
    table = pd.read_csv(tmp_path / "out/table.csv")
    assert table["run"].tolist() == ["two", "one"] * 2
    assert table["line"].tolist() == [1, 2] * 2
    assert "| # | Run | Model |" in (tmp_path / "out/table.md").read_text()
    assert set(pd.read_csv(tmp_path / "out/samples.csv")["run"]) == {"one", "two"}


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [small_run(tmp_path / name / "run") for name in ("one", "two")]
    assert [line.run for line in load_runs(runs).lines] == [str(path) for path in runs]


# columns that only some runs have -----------------------------------------------------------------


def run_of(folder: Path, *cells: dict[str, Any], **diagnostics: float) -> list[Line]:
    """Two images a cell; only the last cell has the diagnostics, a quarter more on image 1."""
    store = RunStore(folder)
    store.write_cells(list(cells))
    for entry in cells:
        rows = []
        for i in range(2):
            own = {name: value * (1 + i / 4) for name, value in diagnostics.items()}
            own = own if entry is cells[-1] else {}
            rows += image_rows(entry, image_id(i), 20.0, diagnostics=own)
        write_rows(store, entry, rows)
    return list(load_runs([folder]).lines)


def main_of(lines: list[Line]) -> list[dict[str, str]]:
    derived = derived_lines(clients_of(lines))
    built = build_table(lines, "standard", derived)
    table = main_table(built, many_runs=False, caption="", title="Every line")
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


# facts --------------------------------------------------------------------------------------------


# main table ---------------------------------------------------------------------------------------


def test_facts_of_the_client_share_a_column(tmp_path: Path) -> None:
    first, second = main_of(
        run_of(
            tmp_path,
            cell("x", gamma=0.1),
            cell("y", plain_share=0.5, augment="crop", server_lr=0.01),
        )
    )
    assert first["client"] == DASH
    assert second["client"] == "plain share 0.5, augment crop, server lr 0.01"
    assert "augment" not in first


def test_options_and_uploads_of_attacks(tmp_path: Path) -> None:
    """A reduction says how many uploads its attacks may use, and has no options of its own."""
    curve_run(tmp_path, (0.27,))
    rows = main_of(list(load_runs([tmp_path]).lines))
    assert [row["uploads"] for row in rows] == ["1", "1", "2", "4", "1", "≤ 4"]
    assert rows[3]["options"] == "uploads=4"
    assert [row["options"] for row in rows[4:]] == [DASH, DASH]
    assert [row["attack's name"] for row in rows] == [DASH, *["multi_round"] * 3, DASH, DASH]
    assert "role" not in rows[0]


def test_controls_have_no_facts_of_attacks(tmp_path: Path) -> None:
    """Their 0 uploads make no column, and stand in none."""
    grey = cell("grey", attack="grey", attack_name="grey", role="floor", uploads=0, engine="none")
    rows = main_of(run_of(tmp_path / "one", cell("x"), grey))
    assert "uploads" not in rows[0]
    assert "engine" not in rows[0]
    several = intact("r", uploads=3)
    rows = main_of(run_of(tmp_path / "two", intact("x"), several, grey | {"victim": "intact"}))
    assert [row["uploads"] for row in rows] == ["1", "3", DASH, "1", "≤ 3"]


# masks, regions and residuals ---------------------------------------------------------------------


def test_regions_have_the_columns_that_exist(tmp_path: Path) -> None:
    lines = run_of(
        *(tmp_path, cell("x", gamma=0.1), cell("y")),
        **{"mask_recall": 0.8, "visible_psnr": 90.0, "gradient_residual": 1e-6, "seconds": 2.0},
    )
    table = regions_table(lines)
    assert table is not None
    assert table.header == (
        *("#", "Model", "Set.", "γ", "Attack", "dtype", "mask recall", "PSNR, unmasked"),
        *("gradient residual (median)", "s / image (median)"),
    )
    # 90 and 112.5 dB: the second is capped
    assert table.rows == (
        ("2", "DeiT-S", "a", "0", "april", "float32", "0.900", "95.00", "1.1e-06", "2.25"),
    )


def test_images_that_have_no_such_diagnostic_are_counted_out(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("x")
    store.write_cells([entry])
    rows = image_rows(entry, image_id(0), 20.0, diagnostics={"jigsaw_direct": 0.25})
    write_rows(store, entry, [*rows, *image_rows(entry, image_id(1), math.inf)])
    table = regions_table(load_runs([tmp_path]).lines)
    assert table is not None
    assert table.rows[0][-1] == "0.250 (n=1)"
