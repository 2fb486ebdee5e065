"""The table of paired tests, recomputed with SciPy from the scores that were written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.figures import success_share
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.tables import comparisons as paired
from mjp_privacy.report.tables.comparisons import CLIENTS_TITLE, clients_table, correlation
from mjp_privacy.report.tables.text import DASH, TextTable
from tests.helpers.card_run import CANDIDATES, CLIENTS, TITLES, ByHand, Expected, card_run
from tests.helpers.ladder_rows import simple_line
from tests.helpers.report_rows import (
    cell,
    image_rows,
    intact,
    psnr_values,
    write_rows,
)

PLAIN = psnr_values(1, 30, 60.0, 20.0)
APRIL = psnr_values(2, 30, 20.0, 3.0)
SPAN = psnr_values(3, 30, 18.0, 4.0)
ROUNDS = psnr_values(4, 30, 30.0, 4.0)
MJP: dict[str, Any] = {"setting": "c", "gamma": 0.27}


def run(
    folder: Path,
    lines: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]],
    groups: Mapping[str, str] | None = None,
) -> Path:
    """A run with a line for each (cell, PSNR by image); images without a number have failed."""
    store = RunStore(folder)
    entries = [cell(f"line {at}", **changes) for at, (changes, _) in enumerate(lines)]
    store.write_cells(entries)
    for entry, (_, psnr) in zip(entries, lines, strict=True):
        masked = {"zero_rows": 50.0} if entry["gamma"] else None
        rows = []
        for image, value in psnr.items():
            status = "failed" if math.isnan(value) else "ok"
            rows += image_rows(entry, image, value, status=status, diagnostics=masked)
        for row in rows:
            row["group"] = (groups or {}).get(row["image_id"])
        write_rows(store, entry, rows)
    return folder


def table(folder: Path) -> TextTable | None:
    return paired.tests_table(clients_of(load_runs([folder]).lines))


def by_title(folder: Path) -> dict[str, tuple[str, ...]]:
    made = table(folder)
    assert made is not None
    assert all(len(row) == len(made.header) == len(made.align) for row in made.rows)
    return {row[1]: row for row in made.rows}


def images(values: Sequence[float]) -> dict[str, float]:
    return {f"image {at:02d}": value for at, value in enumerate(values)}


def three_lines(folder: Path) -> Path:
    """A plain client, and one of MJP attacked three times; two of its images failed."""
    broken = images(SPAN) | {"image 04": math.nan, "image 07": math.nan}
    return run(
        folder,
        [
            ({"attack": "patch_gradient", "victim": "intact"}, images(PLAIN)),
            (MJP, images(APRIL)),
            ({"attack": "masked_span", "victim": "intact", **MJP}, broken),
            ({"attack": "multi_round", "victim": "intact", "uploads": 6, **MJP}, images(ROUNDS)),
        ],
    )


def expected_p(differences: np.ndarray[Any, Any]) -> float:
    return float(scipy.stats.wilcoxon(differences, zero_method="pratt", method="exact").pvalue)


def test_undefended_beside_defended_by_scipy(tmp_path: Path) -> None:
    rows = by_title(three_lines(tmp_path))
    kept = np.array([at not in (4, 7) for at in range(30)])
    plain, span = (np.minimum(values, 100) for values in (PLAIN, SPAN))
    differences = (plain - span)[kept]
    row = rows["worst case, one upload: plain − MJP γ .27"]
    assert row[2:5] == ("28", "2", f"{np.median(differences):+.2f}")
    assert row[5].startswith(f"{differences.mean():+.2f} [")
    assert row[7] == paired.p_text(expected_p(differences))
    reached = np.fmax(np.where(kept, span, -math.inf), ROUNDS)
    row = rows["worst case, any number of uploads: plain − MJP γ .27"]
    assert row[2:4] == ("30", "0")
    assert row[5].startswith(f"{(plain - reached).mean():+.2f} [")


def test_best_attacks_beside_april(tmp_path: Path) -> None:
    rows = by_title(three_lines(tmp_path))
    kept = np.array([at not in (4, 7) for at in range(30)])
    differences = (np.array(SPAN) - np.array(APRIL))[kept]
    row = rows["MJP γ .27: masked_span − april"]
    assert row[0] == "3 − 2"
    assert row[2:5] == ("28", "2", f"{np.median(differences):+.2f}")
    assert row[7] == paired.p_text(expected_p(differences))
    ranks = scipy.stats.rankdata(np.abs(differences))
    effect = float((np.sign(differences) * ranks).sum() / ranks.sum())
    assert row[6] == correlation(effect)
    row = rows["MJP γ .27: multi_round − april"]
    assert row[5].startswith(f"{np.mean(np.array(ROUNDS) - np.array(APRIL)):+.2f} [")


def test_holm_adjusts_for_the_rows_of_the_table(tmp_path: Path) -> None:
    """Holm by hand over SciPy's p of the four comparisons."""
    rows = by_title(three_lines(tmp_path))
    kept = np.array([at not in (4, 7) for at in range(30)])
    plain, span = np.minimum(PLAIN, 100), np.where(kept, SPAN, -math.inf)
    p_values = {
        "worst case, one upload: plain − MJP γ .27": expected_p((plain - span)[kept]),
        "worst case, any number of uploads: plain − MJP γ .27": expected_p(
            plain - np.fmax(span, ROUNDS)
        ),
        "MJP γ .27: masked_span − april": expected_p((span - np.array(APRIL))[kept]),
        "MJP γ .27: multi_round − april": expected_p(np.array(ROUNDS) - np.array(APRIL)),
    }
    assert set(rows) == set(p_values)
    largest = 0.0
    for left, title in zip((4, 3, 2, 1), sorted(p_values, key=p_values.__getitem__), strict=True):
        largest = max(largest, left * p_values[title])
        assert rows[title][8] == paired.p_text(min(1.0, largest)), title


def test_crops_count_by_photograph(tmp_path: Path) -> None:
    groups = {f"image {at:02d}": f"photo {at % 6}" for at in range(30)}
    folder = run(
        tmp_path,
        [
            ({"attack": "patch_gradient", "victim": "intact"}, images(PLAIN)),
            ({"attack": "masked_span", "victim": "intact", **MJP}, images(SPAN)),
        ],
        groups,
    )
    (row,) = by_title(folder).values()
    differences = np.minimum(PLAIN, 100) - np.minimum(SPAN, 100)
    means = np.array([differences[at::6].mean() for at in range(6)])
    assert row[2] == "6 photographs (30 images)"
    assert row[4] == f"{np.median(means):+.2f}"
    assert row[7] == paired.p_text(2 / 2**6)  # all six are higher
    assert row[9] == "0.031 (min)"


def test_exact_pictures_are_equal(tmp_path: Path) -> None:
    """PSNR inf, and above 100, is taken as 100: no difference and nothing to test."""
    folder = run(
        tmp_path,
        [
            ({"attack": "patch_gradient", "victim": "intact"}, images([math.inf] * 5)),
            ({"attack": "masked_span", "victim": "intact", **MJP}, images([math.inf, 120] * 2)),
        ],
    )
    (row,) = by_title(folder).values()
    assert row[2:4] == ("4", "1")
    assert row[5].startswith("+0.00 [0.00")
    assert row[6:] == ("0.00", "1", "1", "1")


@pytest.mark.parametrize(
    "other", [{"batch": 2}, {"dtype": "float64"}, {"size": 192}, {"data": "other.zip"}, {"seed": 1}]
)
def test_clients_in_other_circumstances_are_not_compared(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    folder = run(
        tmp_path,
        [
            ({"attack": "patch_gradient", "victim": "intact"}, images(PLAIN)),
            ({"attack": "masked_span", "victim": "intact", **MJP, **other}, images(SPAN)),
        ],
    )
    assert table(folder) is None


def test_clients_of_other_images_are_counted_not_compared(tmp_path: Path) -> None:
    elsewhere = {f"other {at}": value for at, value in enumerate(SPAN)}
    folder = run(
        tmp_path,
        [
            ({"attack": "patch_gradient", "victim": "intact"}, images(PLAIN)),
            ({}, images(APRIL)),
            ({"attack": "masked_span", "victim": "intact", **MJP}, elsewhere),
        ],
    )
    made = table(folder)
    assert made is not None
    assert [row[1] for row in made.rows] == ["plain: patch_gradient − april"]
    assert made.caption.endswith(" 1 pairs of clients share no image.")


def test_at_most_thirty_rows_and_the_caption_counts_the_rest(tmp_path: Path) -> None:
    defended = [
        ({"attack": "patch_gradient", "victim": "intact", "defenses": f"noise {at}"}, images(SPAN))
        for at in range(35)
    ]
    plain: tuple[Mapping[str, Any], Mapping[str, float]]
    plain = {"attack": "patch_gradient", "victim": "intact"}, images(PLAIN)
    made = table(run(tmp_path, [plain, ({}, images(APRIL)), *defended]))
    assert made is not None
    assert len(made.rows) == paired.MOST == 30
    assert made.rows[-1][1] == "plain: patch_gradient − april"
    assert made.caption.endswith(" 6 further comparisons are not shown, nor counted by Holm.")


def test_p_is_never_zero() -> None:
    assert paired.p_text(1e-9) == paired.p_text(0.0) == "< 1e-4"
    assert paired.p_text(1 / 10001, 1 / 10001) == "0.0001 (min)"
    assert paired.p_text(0.0312, 2 / 2**12) == "0.031"
    assert paired.p_text(1.0, 1.0) == "1"
    assert paired.p_text(math.nan) == "–"


# the table of all clients -------------------------------------------------------------------------

ONE, ANY, CHOICE = "best, 1 upload", "best, any uploads", "attacker's choice, 1 upload"
APRIL_OF_CLIENTS_TABLE = "APRIL as published"


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
    table = clients_table(clients_of(load_runs(folders).lines))
    assert table is not None
    assert table.title == CLIENTS_TITLE
    assert len(table.align) == len(table.header) == len(set(table.header))
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def mean_text(expected: Expected, n: int) -> str:
    other = "" if expected.n == n else f" (n={expected.n})"
    return f"{expected.mean:.2f} [{expected.low:.2f}, {expected.high:.2f}]{other}"


# every figure -------------------------------------------------------------------------------------


def test_april_choice_and_floor(rows: dict[str, dict[str, str]], by_hand: ByHand) -> None:
    row = rows["mjp"]
    n = int(row["n"])
    assert row[APRIL_OF_CLIENTS_TABLE] == mean_text(by_hand.best("mjp", ["april"]), n)
    choice = by_hand.by_residual("mjp", CANDIDATES["mjp"])
    assert choice.mean < by_hand.best("mjp", CANDIDATES["mjp"]).mean
    assert row[CHOICE] == mean_text(choice, n)
    assert row["floor"] == mean_text(by_hand.best("mjp", ["mean_image"]), n)
    plain = rows["plain"]
    assert plain["floor"] == mean_text(by_hand.best("mjp", ["mean_image"]), int(plain["n"]))
    assert rows["withheld"][APRIL_OF_CLIENTS_TABLE] == DASH


# made-up ladders ----------------------------------------------------------------------------------


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
    assert (success_share(line, 20).percent, success_share(line, 30).percent) == expected


def test_a_mean_just_below_the_cap_is_not_rounded_to_it(tmp_path: Path) -> None:
    two_attacks(tmp_path, [99.998, 99.998], [20.0, 20.0])
    (line,) = table_of(tmp_path)
    assert line[ONE].startswith("99.998 [")
    assert line["median"] == "99.998"
