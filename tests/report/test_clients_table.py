"""The table of all clients: every figure recomputed from the stored rows, shares against SciPy."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.figures import success, success_share
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.tables.comparisons import CLIENTS_TITLE, clients_table
from mjp_privacy.report.tables.text import DASH
from mjp_privacy.report.worst_case import reduced_groups
from mjp_privacy.report.write import write_report
from tests.helpers.card_run import CANDIDATES, CLIENTS, TITLES, ByHand, Expected, card_run
from tests.helpers.ladder_rows import curve_run, ladder_run, simple_line
from tests.helpers.report_rows import cell, intact
from tests.helpers.score_interval import score_interval

ONE, ANY, CHOICE = "best, 1 upload", "best, any uploads", "attacker's choice, 1 upload"
APRIL = "APRIL as published"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return card_run(tmp_path_factory.mktemp("clients") / "run")


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, dict[str, str]]:
    made = {row["Client"]: row for row in table_of(folder)}
    return {client: made[TITLES[client]] for client in CLIENTS}


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> ByHand:
    return ByHand(folder)


def table_of(*folders: Path) -> list[dict[str, str]]:
    """A mapping by header for every client."""
    table = clients_table(reduced_groups(load_runs(folders).lines))
    assert table is not None
    assert table.title == CLIENTS_TITLE
    assert len(table.align) == len(table.header) == len(set(table.header))
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def mean_text(expected: Expected, n: int) -> str:
    other = "" if expected.n == n else f" (n={expected.n})"
    return f"{expected.mean:.2f} [{expected.low:.2f}, {expected.high:.2f}]{other}"


def median_text(expected: Expected) -> str:
    return "≥ 100" if expected.median >= 100 else f"{expected.median:.2f}"


def counts(share: str, trials: float | None = None) -> tuple[int, int]:
    """Count and number of a share, whose percent and interval are right to the digits shown.

    trials: as how many independent images they count, where some are crops of one photograph
    """
    found = re.fullmatch(r"(\d+) of (\d+) \(([\d.]+) %, ([\d.]+)–([\d.]+)\)", share)
    assert found, share
    count, of = int(found[1]), int(found[2])
    values = (count / of, *score_interval(count / of, of if trials is None else trials))
    for text, value in zip(found.groups()[2:], values, strict=True):
        decimals = len(text.partition(".")[2])
        assert float(text) == pytest.approx(100 * value, abs=0.5001 * 10**-decimals)
    return count, of


# every figure -------------------------------------------------------------------------------------


def test_every_client_has_a_row(rows: dict[str, dict[str, str]]) -> None:
    assert list(rows) == list(CLIENTS)
    assert rows["april only"]["flags"].startswith("no adaptive attack")


@pytest.mark.parametrize("client", [client for client in CANDIDATES if CANDIDATES[client]])
def test_the_best_with_one_upload(
    rows: dict[str, dict[str, str]], by_hand: ByHand, client: str
) -> None:
    row, best = rows[client], by_hand.best(client, CANDIDATES[client])
    assert row["n"] == str(best.n)
    assert row[ONE] == mean_text(best, best.n)
    assert row["median"] == median_text(best)
    assert counts(row["exact"], best.trials) == (best.exact, best.of)
    assert counts(row["≥ 20 dB"], best.trials) == (best.above_20, best.of)
    above_30 = sum(
        by_hand.scores(client, attack, "psnr", "standard").loc[image, "value"] >= 30
        for image, attack in best.chosen.items()
    )
    assert counts(row["≥ 30 dB"], best.trials) == (above_30, best.of)


def test_the_best_with_any_number(rows: dict[str, dict[str, str]], by_hand: ByHand) -> None:
    row = rows["mjp"]
    best = by_hand.best("mjp", (*CANDIDATES["mjp"], "multi_round"))
    assert row[ANY] == mean_text(best, int(row["n"]))
    assert row["median (any)"] == median_text(best)
    assert counts(row["exact (any)"], best.trials) == (best.exact, best.of)
    assert counts(row["≥ 20 dB (any)"], best.trials) == (best.above_20, best.of)
    assert all(rows[client][ANY] == DASH for client in CLIENTS if client != "mjp")


def test_april_choice_and_floor(rows: dict[str, dict[str, str]], by_hand: ByHand) -> None:
    row = rows["mjp"]
    n = int(row["n"])
    assert row[APRIL] == mean_text(by_hand.best("mjp", ["april"]), n)
    choice = by_hand.by_residual("mjp", CANDIDATES["mjp"])
    assert choice.mean < by_hand.best("mjp", CANDIDATES["mjp"]).mean
    assert row[CHOICE] == mean_text(choice, n)
    assert row["floor"] == mean_text(by_hand.best("mjp", ["mean_image"]), n)
    plain = rows["plain"]
    assert plain["floor"] == mean_text(by_hand.best("mjp", ["mean_image"]), int(plain["n"]))
    assert rows["withheld"][APRIL] == DASH


def test_a_client_without_a_matching_attack_has_no_best(
    rows: dict[str, dict[str, str]], by_hand: ByHand
) -> None:
    row = rows["april only"]
    april = by_hand.best("april only", ["april"])
    empty = [
        *(ONE, "median", "exact", "≥ 20 dB", "≥ 30 dB", CHOICE),
        *(ANY, "median (any)", "exact (any)", "≥ 20 dB (any)"),
    ]
    assert {row[name] for name in empty} == {DASH}
    assert (row["n"], row[APRIL]) == (str(april.n), mean_text(april, april.n))


def test_flags_stand_in_words(rows: dict[str, dict[str, str]]) -> None:
    assert set(rows["mjp"]["flags"].split("; ")) == {
        *("altered client", "below the floor", "not applicable to all", "not converged"),
        *("8-bit pixels assumed", "an attack failed", "not all scored"),
    }
    assert rows["unshuffled"]["flags"] == "fewer attacks; some uploads unshuffled"


# made-up ladders ----------------------------------------------------------------------------------


def test_a_ladder_is_one_line(tmp_path: Path) -> None:
    ladder_run(tmp_path)
    (line,) = table_of(tmp_path)
    assert line["Client"] == "MJP γ .27, as shuffled"
    assert line["n"] == "3"
    assert line[APRIL] == "20.00 [10.00, 30.00] (n=2)"
    assert line[ONE] == "25.00 [20.00, 30.00]"
    assert line[CHOICE] == "21.67 [15.00, 30.00]"
    assert line["floor"] == "11.00 [11.00, 11.00] (n=4)"
    assert counts(line["exact"]) == (0, 4)
    assert counts(line["≥ 20 dB"]) == (3, 4)
    assert counts(line["≥ 30 dB"]) == (1, 4)


def test_several_uploads_have_columns_of_their_own(tmp_path: Path) -> None:
    """And the client without such attacks a dash in them."""
    curve_run(tmp_path / "curve", (0.27,))
    two_attacks(tmp_path / "one", [10.0, 22.0], [31.0, 12.0])
    curve, one = table_of(tmp_path / "curve", tmp_path / "one")
    assert [row["Client"].split(" · ")[-1] for row in (curve, one)] == ["curve", "one"]
    assert (curve[ANY], one[ANY]) == ("≥ 100", DASH)
    assert curve[ONE].startswith("11.45 [")
    assert one[ONE].startswith("26.50 [")
    assert [counts(row["≥ 20 dB"]) for row in (curve, one)] == [(0, 5), (2, 2)]
    assert counts(curve["≥ 20 dB (any)"]) == (5, 5)
    assert counts(one["≥ 30 dB"]) == (1, 2)
    assert curve[APRIL] == DASH


def two_attacks(folder: Path, *psnr: list[float | str], **facts: Any) -> Path:
    store = RunStore(folder)
    entries = [intact(f"{i}", attack=f"attack {i}", **facts) for i in range(len(psnr))]
    store.write_cells(entries)
    for entry, values in zip(entries, psnr, strict=True):
        simple_line(store, entry, values)
    return folder


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
    assert success_share(line, 20).text() == "0 of 0"


def test_exact_images_are_counted_and_the_cap_is_named(tmp_path: Path) -> None:
    two_attacks(tmp_path, [math.inf, 150.0, 10.0], [20.0, math.inf, math.inf])
    (line,) = table_of(tmp_path)
    assert line[ONE] == "≥ 100"
    assert counts(line["exact"]) == (3, 3)
    assert line["median"] == "≥ 100"


def test_a_mean_just_below_the_cap_is_not_rounded_to_it(tmp_path: Path) -> None:
    two_attacks(tmp_path, [99.998, 99.998], [20.0, 20.0])
    (line,) = table_of(tmp_path)
    assert line[ONE].startswith("99.998 [")
    assert line["median"] == "99.998"


def test_controls_alone_make_no_table(tmp_path: Path) -> None:
    two_attacks(tmp_path, [10.0], role="floor")
    assert clients_table(reduced_groups(load_runs([tmp_path]).lines)) is None


def test_the_csv_and_the_table_agree(folder: Path, tmp_path: Path, by_hand: ByHand) -> None:
    write_report([folder], tmp_path / "out", pictures="none")
    frame = pd.read_csv(tmp_path / "out/table.csv")
    worst = frame[(frame["variant"] == "standard") & (frame["role"] == "worst_case")]
    best = by_hand.best("mjp", CANDIDATES["mjp"])
    of_mjp = worst[(worst["n"] == best.n) & worst["attack"].str.contains("1 upload")].iloc[0]
    assert of_mjp["psnr_mean"] == pytest.approx(best.mean)
    assert of_mjp["psnr_exact"] == best.exact
    choices = pd.read_csv(tmp_path / "out/choices.csv")
    chosen = choices[choices["line"] == of_mjp["line"]].set_index("image_id")["chosen_attack"]
    assert chosen.to_dict() == dict(best.chosen)


def test_clients_that_differ_are_told_apart(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    clients: list[dict[str, Any]] = [
        {},
        {"dal": True, "augment": "flip"},
        {"withhold": "pos_embed, unk_embed", "upload": "weight_difference", "seed": 1},
        {"dtype": "float64"},
        {"model": "ViT-S"},
    ]
    entries = [cell(f"{i}", **client) for i, client in enumerate(clients)]
    store.write_cells(entries)
    for entry in entries:
        simple_line(store, entry, [12.0, 13.0])
    assert [row["Client"] for row in table_of(tmp_path)] == [
        "DeiT-S, no defence used · seed 0",
        "plain, DAL in the loss, augment flip · DeiT-S · seed 0",
        "plain, withhold pos embed + unk embed, upload weight difference · DeiT-S · seed 1",
        "DeiT-S, no defence used · float64 · seed 0",
        "ViT-S, no defence used · seed 0",
    ]
