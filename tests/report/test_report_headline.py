"""The first table of a report: what is left, by what was attacked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.headline import TITLE, TITLE_DETAILS, headline_tables
from mjp_privacy.report.loading import load_runs
from mjp_privacy.report.measures import success
from mjp_privacy.report.views import DASH, TextTable
from mjp_privacy.report.worst_case import reduced_groups
from mjp_privacy.report.write import write_report
from tests.helpers.ladder_rows import curve_run, ladder_run, simple_line
from tests.helpers.report_rows import cell

EXACT, FROM_20, FROM_30 = (f"worst case: {what}" for what in ("exact", "≥ 20 dB", "≥ 30 dB"))


def tables_of(*folders: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Headline and details, a mapping by header for every row."""
    loaded = load_runs(folders)
    found = headline_tables(reduced_groups(loaded.lines), many_runs=loaded.many_runs)
    headline, details = (by_header(table) for table in found)
    return headline, details


def by_header(table: TextTable) -> list[dict[str, str]]:
    assert len(table.align) == len(table.header) == len(set(table.header))
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def two_attacks(folder: Path, *psnr: list[float | str], **facts: Any) -> Path:
    store = RunStore(folder)
    entries = [cell(f"{i}", attack=f"attack {i}", **facts) for i in range(len(psnr))]
    store.write_cells(entries)
    for entry, values in zip(entries, psnr, strict=True):
        simple_line(store, entry, values)
    return folder


def test_a_ladder_is_one_line(tmp_path: Path) -> None:
    ladder_run(tmp_path)
    ((line,), _) = tables_of(tmp_path)
    assert line == {
        **{"#": "7", "Model": "DeiT-S", "Set.": "b", "γ": "0.27", "dtype": "float32", "n": "3"},
        "APRIL as published": "20.00 [10.00, 30.00] (n=2)",
        "worst case, 1 upload": "25.00 [20.00, 30.00]",
        "attacker's choice, 1 upload": "21.67 [15.00, 30.00]",
        "grey": "11.00 [11.00, 11.00] (n=4)",
        "other image": "8.00 [8.00, 8.00] (n=4)",
        "ceiling": "40.00 [40.00, 40.00]",
        **{EXACT: "0", FROM_20: "75 %", FROM_30: "25 %"},
    }


def test_details_have_a_line_an_attacker(tmp_path: Path) -> None:
    ladder_run(tmp_path)
    _, details = tables_of(tmp_path)
    assert [row["Attacker"] for row in details] == [
        *("APRIL as published", "worst case, 1 upload", "attacker's choice, 1 upload"),
        *("grey", "other image", "ceiling"),
    ]
    assert [row["#"] for row in details] == ["1", "7", "8", "4", "5", ""]
    assert [row["not scored"] for row in details] == ["2", "1", "1", "0", "0", DASH]
    assert [row["median"] for row in details] == [
        *("20.00", "25.00", "20.00", "11.00", "8.00", "40.00")
    ]
    assert [row["≥ 20 dB"] for row in details] == ["25 %", "75 %", "50 %", "0 %", "0 %", DASH]


def test_it_comes_first(tmp_path: Path) -> None:
    ladder_run(tmp_path / "run")
    write_report([tmp_path / "run"], tmp_path / "out")
    text = (tmp_path / "out/table.md").read_text()
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles[:3] == [TITLE, TITLE_DETAILS, "Table 5, paper variant of the metrics"]
    assert "an oracle selection, the upper bound on what any selector can reach" in " ".join(
        text.split()
    )


def test_several_uploads_have_a_column_of_their_own(tmp_path: Path) -> None:
    """And the line without such attacks a dash in it; the count is of the strongest."""
    curve_run(tmp_path / "curve", (0.27,))
    two_attacks(tmp_path / "one", [10.0, 22.0], [31.0, 12.0])
    headline, _ = tables_of(tmp_path / "curve", tmp_path / "one")
    assert [row["Run"] for row in headline] == ["curve", "one"]
    several = [row["worst case, any number of uploads"] for row in headline]
    assert several == ["100.00 [100.00, 100.00]", DASH]
    assert headline[0]["worst case, 1 upload"].startswith("11.45 [")
    assert headline[1]["worst case, 1 upload"].startswith("26.50 [")
    assert [row[FROM_20] for row in headline] == ["100 %", "100 %"]
    assert [row[FROM_30] for row in headline] == ["100 %", "50 %"]
    assert "APRIL as published" not in headline[0]


def test_clients_are_told_apart_in_words(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    clients: list[dict[str, Any]] = [
        {},
        {"dal": True, "augment": "flip"},
        {"withhold": ["pos_embed", "unk_embed"], "upload": "weight_difference", "seed": 1},
    ]
    entries = [
        cell(f"{i} {name}", attack=name, **client)
        for i, client in enumerate(clients)
        for name in ("x", "y")
    ]
    store.write_cells(entries)
    for entry in entries:
        simple_line(store, entry, [12.0, 13.0])
    headline, _ = tables_of(tmp_path)
    assert [row["client"] for row in headline] == [
        "seed 0",
        "seed 0, DAL in the loss, augment flip",
        "seed 1, withhold pos_embed + unk_embed, upload weight difference",
    ]


@pytest.mark.parametrize(
    ("psnr", "expected"),
    [
        ([20.0, 30.0, 19.999, 29.999], (75.0, 25.0)),  # at the threshold is above it
        ([math.inf, 10.0], (50.0, 50.0)),
        ([25.0, "failed", "unsupported", 35.0], (50.0, 25.0)),  # not recovered
        ([25.0, "unscored"], (100.0, 0.0)),  # nobody knows
        ([math.nan, 25.0], (50.0, 0.0)),
    ],
)
def test_success_counts_images_that_have_no_reconstruction(
    tmp_path: Path, psnr: list[float | str], expected: tuple[float, float]
) -> None:
    (line,) = load_runs([two_attacks(tmp_path, psnr)]).lines
    assert (success(line, 20, "standard"), success(line, 30, "standard")) == expected


def test_nobody_knows_is_no_share(tmp_path: Path) -> None:
    (line,) = load_runs([two_attacks(tmp_path, ["unscored"])]).lines
    assert math.isnan(success(line, 20, "standard"))


def test_exact_images_are_counted_and_capped(tmp_path: Path) -> None:
    two_attacks(tmp_path, [math.inf, 150.0, 10.0], [20.0, math.inf, math.inf])
    ((line,), details) = tables_of(tmp_path)
    assert line["worst case, 1 upload"] == "100.00 [100.00, 100.00]"
    assert line[EXACT] == "3"
    assert details[0]["median"] == "100.00"


def test_one_attack_makes_no_headline(tmp_path: Path) -> None:
    lines = load_runs([two_attacks(tmp_path, [10.0])]).lines
    assert headline_tables(reduced_groups(lines), many_runs=False) == []
