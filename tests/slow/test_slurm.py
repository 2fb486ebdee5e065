"""A Slurm cluster on this machine: the rows of one process, whatever becomes of its tasks.

tools/slurm-here starts the cluster. Two minutes in all, most of it in which processes start.
"""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.run import RunSummary
from tests.helpers.background import Background
from tests.helpers.command import Command, attack_command
from tests.helpers.runs import attack, rows, same_results, tiny
from tests.helpers.slurm_cluster import SLURM_HERE, kill_node, slurm_here
from tests.helpers.trap import Trap, is_running, until

pytest.importorskip("submitit", reason="the extra `slurm` is not installed")

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("one_thread")]

CONFIG = tiny(
    dtypes=["float32", "float64"],
    attacks=[{"name": "trap"}, {"name": "april"}, {"name": "patch_gradient"}],
)
OPTIONS = ["--engine", "slurm", "--workers", "2", "--partition", "here", "--blocks-per-task", "3"]
LONGEST = 2  # tasks in an array of this cluster


@pytest.fixture(scope="module")
def cluster(planted_trap: Trap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of two nodes, each with one CPU; this process is its client."""
    script = slurm_here()
    if missing := [name for name in script.PROGRAMS if not script.find(name)]:
        pytest.skip(f"`{missing[0]}` is not installed (Debian: slurmctld slurmd slurm-client)")
    folder = tmp_path_factory.mktemp("slurm")
    with (
        script.Cluster(folder, nodes=2, array_size=LONGEST) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", made.environment["SLURM_CONF"])
        yield made


@pytest.fixture(scope="module")
def here(
    nine_photographs: Path, planted_trap: Trap, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run in one process."""
    out = tmp_path_factory.mktemp("here")
    attack(nine_photographs, out, CONFIG)
    return out


@pytest.fixture
def trap(planted_trap: Trap, here: Path, cluster: Any) -> Iterator[Trap]:
    planted_trap.reset()
    yield planted_trap
    planted_trap.reset()
    assert not squeue("--states=PENDING,RUNNING")


def by_slurm(nine_photographs: Path, out: Path, blocks: int = 3) -> Background[RunSummary]:
    engine = EngineConfig("slurm", workers=2, threads=1, blocks_per_task=blocks)
    return Background(lambda: attack(nine_photographs, out, CONFIG, engine=engine), 300)


def squeue(*options: str) -> list[list[str]]:
    """Id and state of every task that Slurm knows of."""
    command = ["squeue", "--noheader", "--array", "--format=%i %T", *options]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.split() for line in listed.splitlines()]


def since(before: list[list[str]]) -> Counter[str]:
    """States of the tasks that are newer than these, and how many are in each."""
    known = {task for task, _ in before}
    return Counter(state for task, state in squeue("--states=all") if task not in known)


def same(here: Path, out: Path, summary: RunSummary) -> None:
    assert summary.exit_code == 0
    same_results(here, out)
    assert not (out / "work").exists()


def times_attacked(out: Path) -> int:
    """How often the trap attacks in a run: once a block in each of its cells."""
    cells = rows(out).query("attack == 'trap'")["run_id"].unique()
    return sum(len(list((out / "rows" / run_id).glob("[0-9]*"))) for run_id in cells)


@pytest.mark.engine
def test_two_tasks_at_once_make_what_one_process_makes(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap
) -> None:
    """Four tasks in arrays of at most two; a report is made of what is there meanwhile."""
    before, out = squeue("--states=all"), tmp_path / "run"
    with by_slurm(nine_photographs, out, blocks=2) as run:
        until(lambda: len(trap.attacked()) > 2, 90)
        trap.hold()
        trap.victims(2)
        report = Command(["report", str(out), "--out", str(tmp_path / "report")], tmp_path / "log")
        with report as reporting:
            assert reporting.wait(200) == 0, reporting.errors()
        assert "trap" in (tmp_path / "report" / "index.html").read_text()
        trap.release()
        same(here, out, run.result())
    assert since(before) == {"COMPLETED": 4}
    assert len({pid for pid, _ in trap.attacked()}) == 4
    assert len(trap.attacked()) == times_attacked(here)


def test_blocks_of_a_killed_task_are_given_again(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap
) -> None:
    before = squeue("--states=all")
    trap.hold()
    with by_slurm(nine_photographs, tmp_path / "run") as run:
        os.kill(trap.victims(2)[0], signal.SIGKILL)
        trap.release()
        same(here, tmp_path / "run", run.result())
    assert since(before) == {"COMPLETED": 4, "FAILED": 1}  # three blocks, each alone, and the rest
    assert len(trap.attacked()) == times_attacked(here) + 1


def test_requeued_tasks_go_on_with_what_is_not_finished(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap
) -> None:
    """One as a node's failure or an administrator requeues it, one as a preemption warns it."""
    before = squeue("--states=all")
    with by_slurm(nine_photographs, tmp_path / "run") as run:
        until(lambda: len(trap.attacked()) > 2, 90)
        trap.hold()
        first = set(trap.victims(2))
        one, other = sorted(task for task, state in squeue() if state == "RUNNING")
        subprocess.run(["scontrol", "requeue", one], check=True)
        subprocess.run(["scancel", "--signal=USR2", other], check=True)
        until(lambda: len(set(trap.victims(2)) - first) == 2, 120)
        trap.release()
        same(here, tmp_path / "run", run.result())
    assert since(before) == {"COMPLETED": 2}
    assert [restarts(one), restarts(other)] == [1, 1]
    assert len(trap.attacked()) == times_attacked(here) + 2


def restarts(task: str) -> int:
    """How often Slurm has requeued a task."""
    shown = subprocess.run(["scontrol", "show", "job", task], capture_output=True, text=True)
    return int(shown.stdout.partition("Restarts=")[2].split()[0])


def test_a_node_dies(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, cluster: Any
) -> None:
    """Slurm requeues its task, of which nobody hears that it ended."""
    before = squeue("--states=all")
    trap.hold()
    with by_slurm(nine_photographs, tmp_path / "run") as run:
        victims = set(trap.victims(2))
        kill_node(cluster, "here1")
        until(lambda: [state for _, state in squeue() if state != "RUNNING"] == ["PENDING"], 90)
        cluster.start_node("here1")
        until(lambda: set(trap.victims(2)) - victims, 120)
        trap.release()
        same(here, tmp_path / "run", run.result())
    assert since(before) == {"COMPLETED": 2}
    known = {task for task, _ in before}
    tasks = [task for task, _ in squeue("--states=all") if task not in known]
    assert sorted(map(restarts, tasks)) == [0, 1]
    assert len(trap.attacked()) == times_attacked(here) + 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_command_that_is_broken_off_leaves_no_task_for_the_next(
    nine_photographs: Path,
    here: Path,
    tmp_path: Path,
    trap: Trap,
    number: signal.Signals,
    code: int,
) -> None:
    """Ctrl-C and SIGTERM, with which Slurm preempts a command that is a job itself, cancel its
    tasks; those of a killed command are cancelled by the next one."""
    before = squeue("--states=all")
    command = attack_command(CONFIG, nine_photographs, tmp_path / "run", OPTIONS, trap.environment)
    with command as running:
        until(lambda: len(trap.attacked()) > 2, 90)
        trap.hold()
        victims = trap.victims(2)
        os.kill(running.pid, number)
        assert running.wait(30) == code
    assert "Traceback" not in running.errors()
    assert running.errors().count("stopped by") == (code > 0)
    if code > 0:
        until(lambda: not any(map(is_running, victims)), 15)
        assert not squeue("--states=PENDING,RUNNING")
    else:
        assert all(map(is_running, victims))
    with by_slurm(nine_photographs, tmp_path / "run") as run:
        until(lambda: not any(map(is_running, victims)), 30)
        trap.release()
        same(here, tmp_path / "run", run.result())
    assert since(before) == {"CANCELLED": 2, "COMPLETED": 2}
    assert len(trap.attacked()) == times_attacked(here) + 2


def test_what_sbatch_refuses_is_said(nine_photographs: Path, tmp_path: Path, trap: Trap) -> None:
    engine = EngineConfig("slurm", partition="nowhere")
    said = r"--engine slurm: expected sbatch to take .*; it says: .*[Ii]nvalid partition name"
    with pytest.raises(UserError, match=said):
        attack(nine_photographs, tmp_path / "run", CONFIG, engine=engine)


def test_a_task_that_would_wait_for_ever_is_given_up(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap
) -> None:
    """Slurm takes it, because the partition's limit may be changed, and never starts it."""
    update = ["scontrol", "update", "PartitionName=here"]
    subprocess.run([*update, "MaxTime=5"], check=True)
    try:
        engine = EngineConfig("slurm", workers=2, minutes=10, blocks_per_task=3)
        summary = attack(nine_photographs, tmp_path / "run", CONFIG, engine=engine)
    finally:
        subprocess.run([*update, "MaxTime=INFINITE"], check=True)
    assert summary.exit_code == 3
    assert "a Slurm task would wait for ever (PartitionTimeLimit), 3 times" in summary.not_done[0]
    same(here, tmp_path / "run", attack(nine_photographs, tmp_path / "run", CONFIG))


def test_the_script_runs_a_command_and_leaves_nothing(tmp_path: Path, trap: Trap) -> None:
    folder = tmp_path / "cluster"
    command = [str(SLURM_HERE), "--nodes", "2", "--cpus", "1", "--folder", str(folder)]
    shown = [*command, "sh", "-c", "srun --nodes=2 --label hostname; exit 7"]
    ended = subprocess.run(shown, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 7
    assert len(ended.stdout.splitlines()) == 2
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert not any(map(is_running, pids))


def test_the_script_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = slurm_here()
    monkeypatch.setattr(script, "PROGRAMS", ("sh", "slurm-of-tomorrow"))
    monkeypatch.setattr("sys.argv", ["slurm-here", "true"])
    assert script.main() == 2
    said = "slurm-here: expected Slurm and munge; `slurm-of-tomorrow` is not here (Debian, Ubuntu: "
    assert said in capsys.readouterr().err
