"""The Slurm engine against commands that a test plays; test_clusters.py has real ones."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("submitit", reason="the extra `slurm` is not installed")

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines import slurm as slurm_module
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.slurm import STARTS, SlurmEngine, SlurmWorker
from mjp_privacy.experiment.engines.tasks import task_file

SCRIPTS = {
    "sbatch": """
if [ -e "$HERE/refusal" ]; then cat "$HERE/refusal" >&2; exit 1; fi
number=$(($(ls "$HERE" | grep -c '[.]sh$') + 1))
cp "$1" "$HERE/$number.sh"
env > "$HERE/$number.environment"
echo "Submitted batch job $number"
""",
    "squeue": 'cat "$HERE/states"',
    "scontrol": """
case "$*" in "show config") echo "MaxArraySize            = $(cat "$HERE/longest")";; esac
""",
    "scancel": "",
    "srun": "",
}


@dataclass(frozen=True)
class FakeSlurm:
    """The commands' folder, with what they answer: `longest` of scontrol, `states` of squeue, which
    fails without, and `refusal` of sbatch, which takes everything without."""

    folder: Path

    def answer(self, name: str, text: str | None) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)

    def say(self, states: Mapping[str, str]) -> None:
        """What squeue answers: {"1_0": "PENDING|Resources"}."""
        self.answer("states", "\n".join(f"{task}|{state}" for task, state in states.items()))

    def cancelled(self) -> list[str]:
        """The arguments with which scancel was called."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith("scancel ")]

    def scripts(self) -> list[str]:
        """The batch scripts that were submitted."""
        return [path.read_text() for path in sorted(self.folder.glob("*.sh"))]


def engine_in(folder: Path, on_gpu: bool = False, **options: Any) -> SlurmEngine:
    """An engine whose workers have tasks, each the block of its number."""
    job = folder / "my run" / "work" / "job.json"
    job.parent.mkdir(parents=True, exist_ok=True)
    for number in range(10):
        task_file(job, number).write_text(f"0 {number} 0 1")
    made = SlurmEngine(EngineConfig("slurm", **options), job, on_gpu)
    made.interval = 0.0
    return made


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Its commands stand before all others in the PATH of this process."""
    monkeypatch.setattr(slurm_module, "LOOK", 0.0)
    made = FakeSlurm(tmp_path / "slurm")
    (made.folder / "bin").mkdir(parents=True)
    for name, lines in SCRIPTS.items():
        path = made.folder / "bin" / name
        note = f'echo "{name} $*" >> "$HERE/calls"'
        path.write_text(f"#!/bin/sh\nHERE='{made.folder}'\n{note}\n{lines}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{made.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    made.answer("longest", "1001")
    made.say({})
    return made


# what becomes of a job ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "name"),
    [
        *((state, state) for state in ("BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL")),
        ("FAILED", "no log"),  # as if the node did not see the folder
        ("OUT_OF_MEMORY", "memory_gb"),
        ("TIMEOUT", "minutes"),
        ("PENDING|(PartitionTimeLimit)", "PartitionTimeLimit"),
        ("PENDING|launch failed requeued held", "requeued held"),
        (None, "UNKNOWN"),
        *((state, "") for state in ("PENDING|Resources", "PENDING|JobHeldUser", "RUNNING")),
        *((state, "") for state in ("COMPLETING", "SUSPENDED", "REQUEUED", "PREEMPTED", "SILENT")),
    ],
)
def test_every_end_is_named_and_jobs_that_wait_or_run_are_not_gone(
    slurm: FakeSlurm, tmp_path: Path, state: str | None, name: str
) -> None:
    """A preempted one may come back, and while Slurm does not answer nothing is known."""
    engine = engine_in(tmp_path)
    engine.start([3])
    slurm.say({"1": state} if state else {})
    if state == "SILENT":
        slurm.answer("states", None)
    gone = engine.gone()
    assert [*gone] == ([3] if name else [])
    assert all(name in words for words in gone.values())
    never = bool(name) and "PENDING" in str(state)
    assert slurm.cancelled() == (["--quiet 1"] if never else [])


# what is submitted --------------------------------------------------------------------------------


def test_what_sbatch_does_not_take_now_waits_and_what_it_never_takes_is_said(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    engine = engine_in(tmp_path)
    slurm.answer(
        "refusal", "sbatch: error: no\nsbatch: error: Batch job submission failed: Invalid qos\n"
    )
    with pytest.raises(UserError, match="Invalid qos"):
        engine.start([0])
    with pytest.raises(UserError, match="50%"):  # which Slurm takes for a pattern
        engine_in(tmp_path / "50%")
    slurm.answer("refusal", None)
    engine = engine_in(tmp_path)
    engine.start([0, 1])
    slurm.answer("refusal", "sbatch: error: Batch job submission failed: Job violates QOS policy")
    engine.start([2])
    slurm.say({"1_0": "RUNNING", "1_1": "RUNNING"})
    assert not engine.gone()
    slurm.answer("refusal", None)
    engine.gone()
    assert ["--array=0-1" in script for script in slurm.scripts()] == [True, False]


def test_options_are_those_of_the_batch_script(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answer("longest", "3")
    engine = engine_in(
        tmp_path,
        on_gpu=True,
        **{"partition": "gpu", "account": "lab", "qos": "long", "minutes": 90, "memory_gb": 12.5},
        slurm_options={"constraint": "a100", "nice": 10},
        setup=("module load python",),
    )
    engine.start(range(7))
    script = slurm.scripts()[0]
    lines = script.splitlines()
    flags = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert {
        *("partition=gpu", "account=lab", "qos=long", "time=90", "mem=12800MB", "requeue"),
        *("constraint=a100", "nice=10", "cpus-per-task=1", "gpus-per-node=1", "array=0-2%3"),
    } <= flags
    assert not [flag for flag in flags if flag.startswith("wckey")]
    assert re.search(r"--job-name=mjp-my-run-[0-9a-f]{8}$", script, re.MULTILINE)
    assert lines.index("export OMP_NUM_THREADS=1") < lines.index("module load python")
    assert ["--array=0-2" in script for script in slurm.scripts()] == [True, True, False]
    engine_in(tmp_path, gpus_per_task=2).start([0])
    assert "gpus" not in slurm.scripts()[3]


# the end ------------------------------------------------------------------------------------------


def test_a_task_that_never_ends_in_time_is_given_up(tmp_path: Path) -> None:
    """Starts count as long as the worker has the same task."""
    job = tmp_path / "job.json"
    worker = SlurmWorker(str(job), 3)
    for text, starts in [("0 0 0 1", 1), ("0 0 0 1", 2), ("0 1 0 1", 1)]:
        task_file(job, 3).write_text(text)
        worker = worker.checkpoint().function
        assert (worker.number, worker.task, worker.starts) == (3, text, starts)
    worker = SlurmWorker(str(job), 3, text, STARTS - 1)
    with pytest.raises(SystemExit, match="minutes"):
        worker.checkpoint()
