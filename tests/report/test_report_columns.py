"""Columns that only some runs have: client, options, uploads, masks, residuals, budgets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.figures import build_table
from mjp_privacy.report.lines import Line, client_text, fact, options_text
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.tables.details import regions_table
from mjp_privacy.report.tables.text import DASH, main_table
from mjp_privacy.report.worst_case import derived_lines, reduced_groups
from tests.helpers.ladder_rows import curve_run
from tests.helpers.report_rows import cell, image_id, image_rows, intact, write_rows


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
    derived = derived_lines(reduced_groups(lines))
    built = build_table(lines, "standard", derived)
    table = main_table(built, many_runs=False, caption="", title="Every line")
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


# facts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ({}, "–"),
        ({"plain_share": 0, "mask": "image", "withhold": [], "dal": False, "lr": 0.1}, "–"),
        ({"plain_share": 0.5}, "plain share 0.5"),
        ({"withhold": ["pos_embed"], "positions": "sinusoidal"}, "withhold pos_embed, positions "
         "sinusoidal"),
        ({"position_noise": 0.01, "dal": True}, "DAL in the loss, position noise 0.01"),
        ({"upload": "weight_difference", "lr": 0.01}, "upload weight difference, lr 0.01"),
    ],
)  # fmt: skip
def test_clients_in_words(cell: dict[str, Any], expected: str) -> None:
    keys = ("dal", "plain_share", "mask", "withhold", "positions", "position_noise", "upload", "lr")
    assert client_text(cell, keys) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("{}", "–"),
        ('{"prior": "fitted", "steps": 300}', "prior=fitted, steps=300"),
        ('{"weights": [1, 0.5], "tv": null}', "weights=[1, 0.5], tv=null"),
        (None, "–"),
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
    ],
)
def test_options_in_words(options: str | None, expected: str) -> None:
    assert options_text(options) == expected


def test_silence_is_the_default() -> None:
    assert fact({}, "uploads") == 1
    assert fact({}, "role") == "attack"
    assert fact({"withhold": []}, "withhold") == fact({}, "withhold")
    assert fact({"withhold": "a, b"}, "withhold") == fact({"withhold": ["a", "b"]}, "withhold")
    assert fact({}, "unheard of") is None


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


def test_one_fact_of_the_client_has_its_name(tmp_path: Path) -> None:
    rows = main_of(run_of(tmp_path, cell("x", gamma=0.1), cell("y", augment="crop")))
    assert [row["augment"] for row in rows] == ["none", "crop"]


def test_lists_differ_too(tmp_path: Path) -> None:
    cells = [cell("x", withhold=[]), cell("y", withhold=["pos_embed"]), cell("z")]
    rows = main_of(run_of(tmp_path, *cells))
    assert [row["withhold"] for row in rows[:3]] == [DASH, "pos_embed", DASH]


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


def test_a_label_that_is_the_name_needs_no_second_column(tmp_path: Path) -> None:
    cells = [cell(name, attack=name, attack_name=name) for name in ("x", "y")]
    assert "attack's name" not in main_of(run_of(tmp_path, *cells))[0]


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


def test_runs_without_diagnostics_have_no_such_table(tmp_path: Path) -> None:
    lines = run_of(tmp_path, cell("x"), ceiling_psnr=20.0, cond_a=10.0)
    assert regions_table(lines) is None
    assert not [name for name in build_table(lines, "paper").frame if "residual" in name]
