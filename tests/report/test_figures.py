"""The figures of a made-up run, by hand."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
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
    COUNT,
    build_table,
    cell,
    frame,
    image_id,
    image_rows,
    intact,
    notes_of,
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


def test_shuffled_line_by_hand(written: tuple[Path, ReportSummary]) -> None:
    line = frame(written[0], "standard").loc["shuffled"]
    patches = [0.0] + [50.0 + i % 3 for i in range(1, COUNT)]
    assert line["shuffled_patches_median"] == np.median(patches)
    assert line["empty_masks"] == 1
    assert line["cond_a_median"] == math.inf
    assert math.isnan(line["psnr_paper"])  # the standard variant stands beside nothing


def test_exact_images_are_capped_and_counted(written: tuple[Path, ReportSummary]) -> None:
    line = frame(written[0], "standard").loc["exact"]
    values = [math.inf if i % 4 == 0 else 130.0 + i for i in range(COUNT)]
    assert line["psnr_mean"] == 100.0
    assert line["psnr_exact"] == COUNT // 4
    assert line["psnr_median"] == np.median(values)


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


def test_crops_are_resampled_by_photograph(tmp_path: Path) -> None:
    values = np.repeat([8.0, 12.0, 16.0, 20.0, 24.0], 8)
    folder = small_run(tmp_path / "run", tuple(values))
    plain = build_table([only_line(folder)], "standard").frame.iloc[0]
    store = RunStore(folder)
    rows = store.read("small")
    shutil.rmtree(folder / "rows")
    store.write("small", 0, rows.assign(group=rows["image_id"]))
    assert only_line(folder).groups is None  # each its own photograph
    rows["group"] = [f"photo {int(name[1:9]) // 8}" for name in rows["image_id"]]
    store.write("small", 0, rows)
    grouped = build_table([only_line(folder)], "standard").frame.iloc[0]
    assert grouped["psnr_mean"] == plain["psnr_mean"]
    widths = [row["psnr_hi"] - row["psnr_lo"] for row in (grouped, plain)]
    assert widths[0] == pytest.approx(widths[1] * math.sqrt(8), rel=0.15)
    assert "crops of 5 photographs" in notes_of(folder)


def test_columns_appear_where_lines_would_look_alike(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    cells = [
        cell("x", cell_key="1", rounds=1),
        cell("y", cell_key="2", rounds=4, mode="train"),
        cell("no model", cell_key="3", rounds=4, size=0, status="failed", reason="no file"),
    ]
    store.write_cells(cells)
    for entry in cells[:2]:
        write_rows(store, entry, image_rows(entry, image_id(0), 15.0))
    table = build_table(load_runs([tmp_path]).lines, "paper")
    assert table.varying == ("mode", "rounds")
    assert table.frame["rounds"].tolist() == [1, 4, 4]


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


def test_old_runs_have_no_new_columns(tmp_path: Path) -> None:
    rows = main_of(run_of(tmp_path, cell("x", gamma=0.1), cell("y")))
    assert list(rows[0]) == [
        *("#", "Model", "Set.", "γ", "Attack", "n", "not scored", "PSNR ↓", "median", "exact"),
        *("≥ 20 dB", "MSE ↑", "FFT2D ↑", "SSIM ↓", "LPIPS ↑", "Acc. ↑", "Acc. altered"),
        *("grey", "rank ceiling", "cond(A)"),
    ]


def test_precisions_have_a_column_where_they_differ(tmp_path: Path) -> None:
    rows = main_of(run_of(tmp_path, cell("x"), cell("y", dtype="float64")))
    assert [row["dtype"] for row in rows] == ["float32", "float64"]


def test_every_line_counts_its_exact_and_plain_pictures(tmp_path: Path) -> None:
    """Exact by the paper's variant, which rounds to 8 bits; 20 dB of all that were tried."""
    store = RunStore(tmp_path)
    entry = intact("x")
    store.write_cells([entry])
    psnr = (math.inf, 60.0, 20.0, 19.99, 10.0)
    rows = [image_rows(entry, image_id(i), value) for i, value in enumerate(psnr)]
    for row in rows[1]:
        if (row["metric"], row["variant"]) == ("psnr", "paper"):
            row["value"] = math.inf  # 60 dB may be equal after rounding
    rows.append(image_rows(entry, image_id(5), 0.0, status="failed", reason="so it is"))
    rows.append(image_rows(entry, image_id(6), 0.0, status="unscored", reason="so it is"))
    write_rows(store, entry, [row for of_image in rows for row in of_image])
    (row,) = main_of(list(load_runs([tmp_path]).lines))
    assert (row["n"], row["not scored"]) == ("5", "1 failed, 1 unscored")
    assert (row["exact"], row["≥ 20 dB"], row["median"]) == ("2", "3 of 6", "20.00")
    assert row["PSNR ↓"].startswith(f"{(100 + 60 + 20 + 19.99 + 10) / 5:.2f} [")


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


def test_every_diagnostic_of_the_ladder_has_its_column(tmp_path: Path) -> None:
    names = (
        *("mask_precision", "mask_recall", "visible_psnr", "mean_visible_psnr", "masked_psnr"),
        *("oracle_permutation_psnr", "jigsaw_direct", "jigsaw_neighbour", "gradient_residual"),
        *("steps", "seconds"),
    )
    (line,) = run_of(tmp_path, cell("x"), **dict.fromkeys(names, 0.4))
    table = regions_table([line])
    assert table is not None
    assert len(table.header) == 6 + len(names)
    frame = build_table([line], "standard").frame.iloc[0]
    for name in names:
        column = "median" if name in ("gradient_residual", "steps", "seconds") else "mean"
        assert frame[f"{name}_{column}"] == pytest.approx(0.45), name
        assert frame[f"{name}_n"] == 2


def test_images_that_have_no_such_diagnostic_are_counted_out(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    entry = cell("x")
    store.write_cells([entry])
    rows = image_rows(entry, image_id(0), 20.0, diagnostics={"jigsaw_direct": 0.25})
    write_rows(store, entry, [*rows, *image_rows(entry, image_id(1), math.inf)])
    table = regions_table(load_runs([tmp_path]).lines)
    assert table is not None
    assert table.rows[0][-1] == "0.250 (n=1)"
