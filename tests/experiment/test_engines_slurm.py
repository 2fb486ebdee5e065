"""The Slurm engine against commands that a test plays; tests/slow/test_slurm.py has real ones."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("submitit", reason="the extra `slurm` is not installed")

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines import slurm as slurm_module
from mjp_privacy.experiment.engines.slurm_queue import last_line, read_states
from mjp_privacy.experiment.job import Task
from tests.helpers.slurm import ONE, FakeSlurm, arrays, engine_in, tasks


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(slurm_module, "LOOKS", (0.0, 0.0))
    monkeypatch.setattr(slurm_module, "LAST_BREATH", 0.0)
    return FakeSlurm.installed(tmp_path / "slurm", monkeypatch)


# what becomes of it -------------------------------------------------------------------------------


def test_a_task_that_failed_is_lost_with_its_last_words(slurm: FakeSlurm, tmp_path: Path) -> None:
    engine = engine_in(tmp_path, blocks_per_task=2)
    engine.submit(tasks(4))
    slurm.say({"1_0": "RUNNING|None", "1_1": "RUNNING|None"})
    assert not engine.lost()
    log = engine.submission.folder / "1_1_0_log.err"
    log.write_text("RuntimeError: no GPU\nsrun: error: node7: task 0: Exited with exit code 1\n")
    slurm.say({"1_0": "RUNNING|None", "1_1": "FAILED|NonZeroExitCode"})
    reason = "a Slurm task failed: RuntimeError: no GPU"
    assert engine.lost() == [(Task(0, 2), reason), (Task(0, 3), reason)]
    assert not engine.lost()
    assert not slurm.calls("scancel")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("BOOT_FAIL", "had a node that did not start"),
        ("CANCELLED", "was cancelled"),
        ("DEADLINE", "missed its deadline"),
        ("FAILED", "failed: it left no log, as if its node did not see "),
        ("NODE_FAIL", "lost its node"),
        ("OUT_OF_MEMORY", "took more memory than it had (option memory_gb)"),
        ("PENDING|(PartitionTimeLimit)", "would wait for ever (PartitionTimeLimit)"),
        ("PENDING|launch failed requeued held", "would wait for ever (launch failed requeued hel"),
        ("REVOKED", "was taken by another cluster"),
        ("TIMEOUT", "ran out of time (option minutes)"),
    ],
)
def test_states_in_words(slurm: FakeSlurm, tmp_path: Path, state: str, words: str) -> None:
    engine = engine_in(tmp_path)
    engine.submit(tasks(1))
    slurm.say({"1": state})
    [(task, reason)] = engine.lost()
    assert task == Task(0, 0)
    assert reason.startswith(f"a Slurm task {words}")
    assert slurm.calls("scancel") == (["--quiet 1"] if "ever" in words else [])


@pytest.mark.parametrize(
    "state",
    ["PENDING|Resources", "PENDING|JobHeldUser", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"],
)
def test_tasks_that_wait_or_run_are_not_lost(
    slurm: FakeSlurm, tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_module, "GRACE", -1.0)
    engine = engine_in(tmp_path)
    engine.submit(tasks(1))
    slurm.say({"1": state})
    assert not engine.lost()


def test_an_answer_has_a_minute_to_be_seen(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine's file may be seen late; and a preempted task may be queued again."""
    engine = engine_in(tmp_path, **ONE)
    engine.submit(tasks(3))
    slurm.say({"1_0": "COMPLETED", "1_1": "PREEMPTED"})  # and 1_2 is forgotten
    slurm.account({"1_2": "CANCELLED by 1000"})
    assert not engine.lost()
    slurm.say({"1_0": "COMPLETED", "1_1": "RUNNING"})
    assert not engine.lost()
    monkeypatch.setattr(slurm_module, "GRACE", -1.0)
    reasons = ["a Slurm task ended without an answer", "a Slurm task was cancelled"]
    assert engine.lost() == [(Task(0, 0), reasons[0]), (Task(0, 2), reasons[1])]
    assert slurm.calls("sacct") == [
        "--noheader --parsable2 --allocations --format=JobID,State --jobs=1_2"
    ]


def test_without_accounting_a_forgotten_task_is_lost_too(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_module, "GRACE", -1.0)
    engine = engine_in(tmp_path)
    engine.submit(tasks(1))
    assert engine.lost() == [(Task(0, 0), "a Slurm task is not known to Slurm any more")]


def test_tasks_that_were_cancelled_before_they_started_share_a_state(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    engine = engine_in(tmp_path, **ONE)
    engine.submit(tasks(3))
    slurm.say({"1": "CANCELLED|None", "1_0": "RUNNING|None"})
    assert [task.block for task, _ in engine.lost()] == [1, 2]


def test_while_slurm_does_not_answer_nothing_is_lost(slurm: FakeSlurm, tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    engine.submit(tasks(1))
    slurm.be_silent()
    assert not engine.lost()


# room for more ------------------------------------------------------------------------------------


def test_no_more_run_at_once_than_workers(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.take_arrays_of(3)
    engine = engine_in(tmp_path, workers=2, **ONE)
    engine.submit(tasks(6))
    assert arrays(slurm) == ["0-2%2"]
    slurm.say({"1_0": "COMPLETED", "1_1": "FAILED", "1_2": "RUNNING"})
    engine.lost()
    assert arrays(slurm) == ["0-2%2", "0-2%1"]  # one still runs
    slurm.say({"1_2": "FAILED", "2_0": "RUNNING", "2_1": "PENDING", "2_2": "PENDING"})
    engine.lost()
    assert slurm.calls("scontrol")[1:] == ["update JobId=2 ArrayTaskThrottle=2"]


def test_what_sbatch_does_not_take_now_waits_for_the_others(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    engine = engine_in(tmp_path, **ONE)
    engine.submit(tasks(2))
    slurm.refuse("sbatch: error: Batch job submission failed: Job violates QOS policy")
    engine.submit([Task(0, 0).once_more()])
    slurm.say({"1_0": "RUNNING", "1_1": "RUNNING"})
    assert not engine.lost()
    slurm.refuse(None)
    engine.lost()
    assert arrays(slurm) == ["0-1%2", "single"]


def test_what_sbatch_never_takes_is_said(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.refuse(
        "sbatch: error: invalid account\nsbatch: error: Batch job submission failed: No.\n"
    )
    with pytest.raises(UserError, match=r"to take the tasks; it says: Batch job submission failed"):
        engine_in(tmp_path).submit(tasks(1))


# the end ------------------------------------------------------------------------------------------


def test_what_is_left_at_the_end_is_cancelled(slurm: FakeSlurm, tmp_path: Path) -> None:
    engine = engine_in(tmp_path, **ONE)
    engine.submit(tasks(2))
    (engine.submission.folder / "1_0_0_result.pkl").touch()
    engine.close()
    assert [call for call in slurm.calls("scancel") if f"--name={engine.queue.name}" in call]


def test_tasks_that_end_by_themselves_are_left_to_it(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_module, "LAST_BREATH", 60.0)
    engine = engine_in(tmp_path, **ONE)
    engine.submit(tasks(2))
    for number in range(2):
        (engine.submission.folder / f"1_{number}_0_result.pkl").touch()
    slurm.say({"1_0": "COMPLETED", "1_1": "COMPLETED"})
    engine.close()
    assert not slurm.calls("scancel")


def test_arrays_of_a_command_that_was_killed_are_cancelled(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    killed = engine_in(tmp_path)
    killed.submit(tasks(2))
    assert not slurm.calls("scancel")
    engine_in(tmp_path)
    assert [call for call in slurm.calls("scancel") if f"--name={killed.queue.name}" in call]


# mistakes -----------------------------------------------------------------------------------------


def test_submitit_is_not_installed(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "submitit" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with pytest.raises(UserError) as raised:
        engine_in(tmp_path)
    assert str(raised.value) == (
        "--engine slurm: expected the package submitit, which is not installed here. Install it: "
        "pip install 'mjp-privacy[slurm]'."
    )


def test_slurm_is_not_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as raised:
        engine_in(tmp_path)
    assert str(raised.value) == (
        "--engine slurm: expected Slurm's commands on this machine; `sbatch` is not here. Run the "
        "command on a machine from which jobs are submitted, try it on a cluster of its own with "
        "tools/slurm-here, or take --engine local."
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus_per_task": 0.5}, r"expected a whole number of GPUs .*, got gpus_per_task=0\.5"),
        ({"minutes": 2}, r"expected 5 minutes or more .* got minutes=2\. A task is warned .* 4 m"),
    ],
)
def test_what_slurm_takes_and_does_not_do_is_refused(
    slurm: FakeSlurm, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        engine_in(tmp_path, **options)


def test_a_folder_that_slurm_takes_for_a_pattern_is_refused(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"expected a run folder without % .*, got \S*/50%/my run"):
        engine_in(tmp_path / "50%")


def test_states_are_read_as_both_commands_print_them() -> None:
    listed = read_states("12_3|PENDING|(Priority)\n12|CANCELLED by 1000\n")
    assert {task: dataclasses.astuple(state) for task, state in listed.items()} == {
        "12_3": ("PENDING", "Priority"),
        "12": ("CANCELLED", ""),
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("Killed by hand\n\n", "Killed by hand"),
        ("srun: error: node7: task 0: Killed\n", "srun: error: node7: task 0: Killed"),
        ("MemoryError\nslurmstepd: error: x\nsrun: error: y\n", "MemoryError"),
        ("submitit WARNING (x) - Bypassing signal SIGTERM\nsrun: Killed\n", "srun: Killed"),
    ],
)
def test_the_last_line_of_a_log_is_the_tasks_own(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_line(tmp_path / "log") == line
    assert last_line(tmp_path / "none") == ""
