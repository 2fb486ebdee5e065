"""Workers of this machine: the rows of one process, whoever dies on the way."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.start import LocalEngine
from tests.helpers.background import Background
from tests.helpers.command import attack_command
from tests.helpers.engine_runs import CONFIG, all_rows, same_rows
from tests.helpers.runs import attack
from tests.helpers.trap import Trap, is_running, until

ONE, TWO = EngineConfig("local", workers=1), EngineConfig("local", workers=2)
OPTIONS = ["--engine", "local", "--workers", "1"]


def test_a_killed_worker_changes_nothing(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap
) -> None:
    out = tmp_path / "two"
    trap.hold()
    with Background(lambda: attack(nine_photographs, out, CONFIG, engine=TWO)) as run:
        first = trap.victims(2)[0]
        os.kill(first, signal.SIGKILL)
        trap.release()
        assert run.result().exit_code == 0
    same_rows(here, out)
    assert len(trap.attacked()) == 7  # three blocks in two cells, and the one of the killed worker
    before = sorted(out.glob("rows/*/*"))
    assert attack(nine_photographs, out, CONFIG, engine=ONE).exit_code == 0
    assert sorted(out.glob("rows/*/*")) == before  # nothing was left to be done


@pytest.mark.nightly
def test_a_block_that_always_kills_its_worker_is_given_up(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap
) -> None:
    """It is named; the others are done; the next command does it."""
    out = tmp_path / "run"
    trap.kill_at(4)
    config = {**CONFIG, "dtypes": ["float32"]}
    summary = attack(nine_photographs, out, config, engine=ONE)
    assert summary.exit_code == 3
    [line] = summary.not_done
    assert "ViT, block " in line
    assert "signal 9" in line
    assert len([labels for _, labels in trap.attacked() if 4 in labels]) == 3
    rows = all_rows(out)
    assert rows[rows["attack"] == "trap"]["image_id"].nunique() == 6
    trap.reset()
    assert attack(nine_photographs, out, config).exit_code == 0
    assert len(trap.attacked()) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.nightly),
    ],
)
def test_workers_end_with_their_command(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, number: int, code: int
) -> None:
    out = tmp_path / "run"
    trap.hold()
    with attack_command(CONFIG, nine_photographs, out, OPTIONS, trap.environment) as running:
        workers = trap.victims(1)
        os.kill(running.pid, number)
        assert running.wait(30) == code
        until(lambda: not any(map(is_running, workers)), 15)
        assert "Traceback" not in running.errors()
        assert running.errors().count("stopped by") == (code > 0)
    trap.release()
    assert attack(nine_photographs, out, CONFIG).exit_code == 0
    same_rows(here, out)


def test_each_worker_has_a_gpu_and_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that print what they were given stand in for Python; then there are none."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "GPU $CUDA_VISIBLE_DEVICES, $OMP_NUM_THREADS thread"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    engine = LocalEngine(tmp_path / "job.json", 3, gpus=["2", "GPU-7f"])
    engine.start([0, 1, 2])
    gone: dict[int, str] = {}
    until(lambda: gone.update(engine.gone()) or len(gone) == 3, 20)
    assert {number: words.rpartition(": ")[2] for number, words in gone.items()} == {
        0: "GPU 2, 1 thread",
        1: "GPU GPU-7f, 1 thread",
        2: "GPU 2, 1 thread",
    }
    program.unlink()
    engine.start([1])
    [words] = engine.gone().values()
    assert "could not be started" in words
