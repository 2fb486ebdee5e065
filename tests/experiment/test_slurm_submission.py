"""What the Slurm engine submits: chunks of blocks, arrays of chunks, and their options."""

from __future__ import annotations

import os
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("submitit", reason="the extra `slurm` is not installed")

from mjp_privacy.experiment.engines.slurm_submission import chunks_of
from tests.helpers.slurm import ONE, FakeSlurm, arrays, engine_in, tasks


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.installed(tmp_path / "slurm", monkeypatch)


def test_a_chunk_holds_consecutive_blocks_of_one_model() -> None:
    given = [*tasks(3), *tasks(2, model=1)]
    blocks = [[(task.model, task.block) for task in chunk] for chunk in chunks_of(given, 2)]
    assert blocks == [[(0, 0), (0, 1)], [(0, 2)], [(1, 0), (1, 1)]]


def test_a_task_that_is_given_again_is_alone() -> None:
    again = [task.once_more() for task in tasks(2)]
    assert list(chunks_of([*tasks(2), *again], 8)) == [tasks(2), [again[0]], [again[1]]]


def test_arrays_are_as_long_as_the_cluster_takes_them(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.take_arrays_of(3)
    engine_in(tmp_path, **ONE).submit(tasks(7))
    assert arrays(slurm) == ["0-2%3", "0-2%3", "single"]


@pytest.mark.parametrize(
    ("workers", "count", "sizes"),
    [(None, 3, "0-2%3"), (2, 8, "0-7%2"), (2, 40, "0-7%2"), (1, 1000, "0-62%1")],
)
def test_without_a_number_each_worker_gets_four_tasks_of_at_most_sixteen_blocks(
    slurm: FakeSlurm, tmp_path: Path, workers: int | None, count: int, sizes: str
) -> None:
    engine_in(tmp_path, workers=workers).submit(tasks(count))
    assert arrays(slurm) == [sizes]


def test_options_are_those_of_the_batch_script(slurm: FakeSlurm, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "partition": "gpu",
        "account": "lab",
        "qos": "long",
        "minutes": 90,
        "memory_gb": 12.5,
        "slurm_options": {"constraint": "a100", "nice": 10},
        "setup": ("module load python",),
    }
    engine_in(tmp_path, threads=4, on_gpu=True, **options, **ONE).submit(tasks(2))
    [script] = slurm.scripts()
    lines = script.splitlines()
    flags = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert {
        *("partition=gpu", "account=lab", "qos=long", "time=90", "mem=12800MB", "requeue"),
        *("constraint=a100", "nice=10", "cpus-per-task=4", "gpus-per-node=1", "array=0-1%2"),
    } <= flags
    assert not [flag for flag in flags if flag.startswith("wckey")]
    assert re.search(r"--job-name=mjp-my-run-[0-9a-f]{8}$", script, re.MULTILINE)
    assert lines.index("export OMP_NUM_THREADS=4") < lines.index("module load python")
    [command] = [line for line in lines if line.startswith("srun")]
    assert "--cpus-per-task=4" in command


def test_a_run_on_cpus_asks_for_no_gpu(slurm: FakeSlurm, tmp_path: Path) -> None:
    engine_in(tmp_path, gpus_per_task=2).submit(tasks(1))
    assert "gpus" not in slurm.scripts()[0]
    engine_in(tmp_path, on_gpu=True, gpus_per_task=2).submit(tasks(1))
    assert "--gpus-per-node=2" in slurm.scripts()[1]


def test_what_is_pickled_are_paths_and_numbers(slurm: FakeSlurm, tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    engine.submit(tasks(2))
    [first, _] = engine.submission.folder.glob("*_submitted.pkl")
    strings: list[str] = []
    classes = []
    for operation, value, _ in pickletools.genops(first.read_bytes()):
        if operation.name == "STACK_GLOBAL":
            classes.append(tuple(strings[-2:]))
        if isinstance(value, str):
            strings.append(value)
    home = "mjp_privacy.experiment.engines.slurm_chunk"
    assert classes == [("submitit.core.utils", "DelayedSubmission"), (home, "Chunk")]
    assert first.stat().st_size < 2000


def test_tasks_do_not_inherit_the_job_that_the_command_is_part_of(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1000")
    engine_in(tmp_path).submit(tasks(1))
    assert "SLURM_MEM_PER_CPU=1000" in slurm.environment(1)  # a setting of the user's own
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    engine_in(tmp_path).submit(tasks(1))
    inherited = [line for line in slurm.environment(2).splitlines() if line.startswith("SLURM_")]
    assert inherited == ["SLURM_CONF=/etc/slurm.conf"]
    assert os.environ["SLURM_MEM_PER_CPU"] == "1000"
