"""Workers of this machine: the rows of one process, whoever dies on the way."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mjp_privacy.experiment.engines.options import EngineConfig
from tests.helpers.background import Background
from tests.helpers.runs import (
    attack,
    cell,
    one_cell,
    rows,
    same_results,
    same_rows,
    tiny,
    written,
)
from tests.helpers.trap import Trap, is_running

TWO = EngineConfig("local", workers=2, threads=1)
ONE = EngineConfig("local", workers=1, threads=1)
BOTH = ["float32", "float64"]
pytestmark = pytest.mark.usefixtures("one_thread")

TRAPPED = one_cell(attacks=[{"name": "trap"}, {"name": "grey"}])


@pytest.fixture(scope="module")
def here(
    nine_photographs: Path, planted_trap: Trap, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run of `TRAPPED` in this process."""
    out = tmp_path_factory.mktemp("here")
    attack(nine_photographs, out, TRAPPED)
    return out


@pytest.fixture
def trap(planted_trap: Trap, here: Path) -> Iterator[Trap]:
    planted_trap.reset()
    yield planted_trap
    planted_trap.reset()


def blocks(trap: Trap) -> list[list[int]]:
    """The labels of every block that was attacked; a photograph's label is its number."""
    return sorted(sorted(labels) for _, labels in trap.attacked())


def planned(out: Path) -> list[list[int]]:
    """The labels of the blocks of a run, by number."""
    files = sorted((out / "rows" / cell(out, attack="trap")["run_id"]).glob("[0-9]*"))
    stems = [set(pd.read_parquet(file)["image_id"]) for file in files]
    return [sorted(int(Path(name).stem) for name in block) for block in stems]


def logged(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_two_workers_make_what_one_process_makes(nine_photographs: Path, tmp_path: Path) -> None:
    attack(nine_photographs, tmp_path / "here", tiny(dtypes=BOTH))
    summary = attack(nine_photographs, tmp_path / "two", tiny(dtypes=BOTH), engine=TWO)
    assert summary.exit_code == 0
    same_results(tmp_path / "here", tmp_path / "two")
    assert not (tmp_path / "two" / "work").exists()


def test_what_is_counted_ends_at_the_total(
    nine_photographs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = one_cell(attacks=[{"name": "grey"}])
    attack(nine_photographs, tmp_path / "run", config, engine=TWO)
    assert "attack: 9/9 ·" in capfd.readouterr().err
    before = written(tmp_path / "run")
    attack(nine_photographs, tmp_path / "run", config, engine=TWO)
    assert "all 9 units are finished already; nothing to do" in capfd.readouterr().err
    assert written(tmp_path / "run") == before


def test_the_block_of_a_killed_worker_is_given_again(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap
) -> None:
    trap.hold()
    with Background(lambda: attack(nine_photographs, tmp_path / "two", TRAPPED, engine=TWO)) as run:
        first = trap.victims(2)[0]
        os.kill(first, signal.SIGKILL)
        trap.release()
        summary = run.result()
    assert summary.exit_code == 0
    same_results(here, tmp_path / "two")
    [lost] = [sorted(labels) for pid, labels in trap.attacked() if pid == first]
    assert blocks(trap) == sorted([*planned(here), lost])


def test_a_block_that_always_kills_its_worker_is_given_up(
    nine_photographs: Path,
    here: Path,
    tmp_path: Path,
    trap: Trap,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    first, deadly, last = planned(here)
    trap.kill_at(deadly[0])
    summary = attack(nine_photographs, out, TRAPPED, engine=ONE)
    assert summary.exit_code == 3
    reason = "worker 0 was killed by signal 9, as a system does that is out of memory, 3 times"
    assert summary.not_done == (f"ViT, block 1: {reason}",)
    assert f"ViT, block 1 was not done: {reason}" in capfd.readouterr().err
    assert blocks(trap) == sorted([first, deadly, deadly, deadly, last])
    assert set(rows(out)["image_id"]) == {f"{at}.png" for at in (*first, *last)}
    finished = written(out)

    trap.reset()
    assert attack(nine_photographs, out, TRAPPED, engine=ONE).exit_code == 0
    assert blocks(trap) == [deadly]
    assert written(out).items() >= finished.items()
    same_rows(here, out)


def test_a_worker_that_ends_by_itself_is_told_with_its_last_words(
    nine_photographs: Path, tmp_path: Path, trap: Trap
) -> None:
    trap.quit_at(*range(10))
    summary = attack(nine_photographs, tmp_path / "run", TRAPPED, limit=3, engine=ONE)
    words = "worker 0 ended with code 5: the last words of a worker, 3 times"
    assert summary.not_done == (f"ViT, block 0: {words}",)


def test_a_worker_that_cannot_be_started_is_told(
    nine_photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    summary = attack(nine_photographs, tmp_path / "run", one_cell(), limit=3, engine=ONE)
    [line] = summary.not_done
    assert line.startswith("ViT, block 0: worker 0 could not be started: [Errno 2] No such file")


def test_an_error_that_is_a_bug_is_the_row_of_its_image_alone(
    nine_photographs: Path,
    here: Path,
    tmp_path: Path,
    trap: Trap,
    capfd: pytest.CaptureFixture[str],
) -> None:
    trap.fail_at(planned(here)[1][0])
    summary = attack(nine_photographs, tmp_path / "run", TRAPPED, engine=TWO)
    assert summary.exit_code == 3
    assert not summary.not_done
    found = rows(tmp_path / "run")
    failed = found[found["status"] == "failed"]
    assert set(failed["image_id"]) == {f"{planned(here)[1][0]}.png"}
    assert set(failed["attack"]) == {"trap"}
    [reason] = set(failed["reason"])
    assert reason.startswith("ZeroDivisionError: planted by a test (")
    assert "trap_attack.py:" in reason
    assert len(set(found["image_id"])) == 9
    assert f"block 1: FAILED. {reason}. The traceback is in " in capfd.readouterr().err
    [entry] = [entry for entry in logged(tmp_path / "run") if "traceback" in entry]
    assert "Traceback" in entry["traceback"]
    assert "trap_attack.py" in entry["traceback"]


def test_workers_end_where_the_run_is_broken_off(
    nine_photographs: Path, tmp_path: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in this process, here one while a message is written down, ends the workers."""
    from mjp_privacy.experiment.save import RunLedger

    class DiskFull(Exception):
        pass

    def full(*_: object) -> None:
        trap.hold()
        trap.victims(1)
        raise DiskFull

    monkeypatch.setattr(RunLedger, "_save_time", full)
    with pytest.raises(DiskFull) as raised:
        attack(nine_photographs, tmp_path / "run", TRAPPED, engine=TWO)
    assert {pid for pid, _ in trap.attacked()}
    assert not [pid for pid, _ in trap.attacked() if is_running(pid)]
    assert raised.tb is not None  # while somebody still holds the error, as a notebook does


def test_a_mistake_that_only_workers_meet_is_no_fault_of_the_package(
    nine_photographs: Path, tmp_path: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack that is registered in this process alone is unknown to workers."""
    monkeypatch.delenv("PYTHONPATH")
    summary = attack(nine_photographs, tmp_path / "run", TRAPPED, engine=ONE)
    [line] = summary.not_done
    assert "block 0" in line
    assert "Unknown attack 'trap'" in line
    assert "fault" not in line
