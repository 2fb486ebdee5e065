"""Time for each image: best so far or `unsupported`, kept by a resume, made again with more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attacks import ATTACKS
from attacks.budget import over_budget
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.store import RunStore
from tests.helpers.faulty_attacks import WHERE
from tests.helpers.runs import (
    attack,
    cells,
    one_cell,
    outcome,
    rows,
    same_results,
    written,
)

REASON = "over budget: attack.seconds = 0.3"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with ATTACKS.registered("slow", Entry(f"{WHERE}:Slow")):
        yield


def with_slow(budget: Any = 0.3, **options: Any) -> dict[str, Any]:
    return one_cell(attacks=[{"name": "slow", "options": options, "seconds": budget}])


def diagnostic(run: Path, name: str) -> dict[str, float]:
    found = rows(run)
    found = found[found["metric"] == name]
    return dict(zip(found["image_id"], found["value"], strict=True))


def test_an_attack_that_looks_gives_its_best_so_far(three: Path, tmp_path: Path) -> None:
    started = time.process_time()
    assert attack(three, tmp_path, with_slow(looks=True)).exit_code == 0
    assert time.process_time() - started < 15  # it wants 3 s; the rest is torch's start
    assert outcome(tmp_path) == {"0.png": ("ok", ""), "1.png": ("ok", REASON), "2.png": ("ok", "")}
    assert diagnostic(tmp_path, "over_budget") == {"0.png": 0, "1.png": 1, "2.png": 0}
    assert set(diagnostic(tmp_path, "attack_seconds").values()) == {0.3}


def test_one_that_does_not_look_is_over_budget_and_its_neighbours_are_not(
    three: Path, tmp_path: Path
) -> None:
    summary = attack(three, tmp_path, with_slow())
    assert summary.exit_code == 0
    assert any(REASON in line for line in summary.inapplicable)
    expected = {"0.png": ("ok", ""), "1.png": ("unsupported", REASON), "2.png": ("ok", "")}
    assert outcome(tmp_path) == expected


@pytest.mark.parametrize("looks", [True, False])
def test_a_resume_keeps_them_and_more_time_makes_them_again(
    three: Path, tmp_path: Path, looks: bool
) -> None:
    run, config = tmp_path / "run", with_slow(0.1, looks=looks, seconds=0.3)
    attack(three, run, config)
    assert outcome(run)["1.png"] == ("ok" if looks else "unsupported", over_budget(0.1))
    RunStore(run).compact(cells(run)[0]["run_id"], fewest_files=1)
    before = written(run)
    attack(three, run, config, attack_seconds=0.05)  # less than the config's own
    assert written(run) == before
    attack(three, run, config, attack_seconds=60.0)
    assert outcome(run)["1.png"] == ("ok", "")
    attack(three, tmp_path / "fresh", config, attack_seconds=60.0)
    same_results(run, tmp_path / "fresh")
    assert [e["run_id"] for e in cells(run)] == [e["run_id"] for e in cells(tmp_path / "fresh")]


def test_the_budget_is_no_part_of_what_a_cell_is(three: Path, tmp_path: Path) -> None:
    for name, seconds in (("with", 60.0), ("without", None)):
        attack(three, tmp_path / name, with_slow(seconds, looks=True, seconds=0.01))
    first, second = (cells(tmp_path / name)[0] for name in ("with", "without"))
    assert first["run_id"] == second["run_id"]
    assert first["cell_key"] == second["cell_key"]
    kept = ~rows(tmp_path / "with")["metric"].isin(["attack_seconds", "over_budget"])
    same = rows(tmp_path / "with")[kept]["value"].tolist()
    assert same == pytest.approx(rows(tmp_path / "without")["value"].tolist(), nan_ok=True)
