"""Ray and Slurm on this machine: the rows of one process, whatever dies on the way.

tools/slurm-here starts the Slurm cluster (Debian: apt install slurmctld slurmd slurm-client munge).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.run import RunSummary
from tests.helpers.background import Background
from tests.helpers.command import attack_command
from tests.helpers.engine_runs import CONFIG, same_rows
from tests.helpers.runs import attack
from tests.helpers.slurm_cluster import kill_node, slurm_here
from tests.helpers.trap import Trap, children_of, is_running, until

BLOCKS = 6  # that the trap attacks in a run
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]


def victims(
    trap: Trap, count: int, *before: int, run: Background[RunSummary] | None = None
) -> list[int]:
    """Processes that wait in the attack, apart from those before; clusters start them slowly. The
    error of a run that ended without them is raised at once."""

    def others() -> list[int]:
        if run is not None and not run.thread.is_alive():
            run.result()
        pids = {pid for pid, _ in trap.attacked()} - {*before}
        return [pid for pid in pids if is_running(pid)]

    return until(lambda: pids if len(pids := others()) >= count else None, 300)


def by(engine: EngineConfig, images: Path, out: Path) -> Background[RunSummary]:
    return Background(lambda: attack(images, out, CONFIG, engine=engine), 300)


def broken_off(images: Path, out: Path, trap: Trap, options: list[str], number: int) -> list[int]:
    """Send a signal to a command while two of its workers attack; its workers and their kin."""
    trap.hold()
    with attack_command(CONFIG, images, out, options, trap.environment) as running:
        started = [*victims(trap, 2), *children_of(running.pid)]
        os.kill(running.pid, number)
        assert running.wait(60) == dict(SIGNALS)[signal.Signals(number)]
        assert "Traceback" not in running.errors()
        assert running.errors().count("stopped by") == (number != signal.SIGKILL)
    return started


# Ray ----------------------------------------------------------------------------------------------


@pytest.fixture
def ray_cluster(trap: Trap) -> Iterator[Any]:
    """A head and a second node, each with one CPU; they know the trap."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    made.add_node(**node)
    yield made
    ray.shutdown()
    made.shutdown()


@needs_ray
@pytest.mark.engine
def test_a_ray_node_dies(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, ray_cluster: Any
) -> None:
    """Two workers, without being asked for; the task of the one is done by the other."""
    trap.hold()
    engine = EngineConfig("ray", address=ray_cluster.address)
    with by(engine, nine_photographs, tmp_path / "run") as run:
        first = victims(trap, 2, run=run)
        ray_cluster.remove_node(ray_cluster.list_all_nodes()[-1], allow_graceful=False)
        until(lambda: [pid for pid in first if not is_running(pid)])
        trap.release()
        assert run.result().exit_code == 0
    same_rows(here, tmp_path / "run")
    assert len(trap.attacked()) == BLOCKS + 1


@needs_ray
@pytest.mark.nightly
def test_the_ray_cluster_goes_and_the_run_says_so(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, ray_cluster: Any
) -> None:
    trap.hold()
    options = ["--engine", "ray", "--address", ray_cluster.address]
    out = tmp_path / "run"
    with attack_command(CONFIG, nine_photographs, out, options, trap.environment) as running:
        victims(trap, 2)
        for node in ray_cluster.list_all_nodes():
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)
        assert running.wait(60) == 2
        assert ray_cluster.address in running.errors()
        assert "Traceback" not in running.errors()
    trap.release()
    assert attack(nine_photographs, out, CONFIG).exit_code == 0
    same_rows(here, out)


@needs_ray
@pytest.mark.nightly
@pytest.mark.parametrize("number", [number for number, _ in SIGNALS])
def test_ray_ends_with_the_command_that_started_it(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, number: int
) -> None:
    out, options = tmp_path / "run", ["--engine", "ray", "--workers", "2"]
    started = broken_off(nine_photographs, out, trap, options, number)
    until(lambda: not any(map(is_running, started)), 30)
    trap.release()
    assert attack(nine_photographs, out, CONFIG).exit_code == 0
    same_rows(here, out)


@needs_ray
@pytest.mark.parametrize("address", ["6379", "ray://head:10001", "head:port", None])
def test_an_address_where_no_ray_is(address: str | None, tmp_path: Path) -> None:
    from mjp_privacy.experiment.engines.ray import RayEngine

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        named = address or f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UserError, match=f"--address {named}"):
            RayEngine.of(EngineConfig("ray", address=named), tmp_path / "job.json", False)


@needs_ray
def test_gpus_for_tasks_of_the_cpu_are_refused(tmp_path: Path) -> None:
    from mjp_privacy.experiment.engines.ray import RayEngine

    with pytest.raises(UserError, match="gpus_per_task"):
        RayEngine.of(EngineConfig("ray", gpus_per_task=1), tmp_path / "job.json", False)


# Slurm --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm_cluster(planted_trap: Trap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of two nodes, each with one CPU; this process is its client."""
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    script = slurm_here()
    if missing := [name for name in script.PROGRAMS if not script.find(name)]:
        pytest.skip(f"`{missing[0]}` is not installed (Debian: slurmctld slurmd slurm-client)")
    with (
        script.Cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", made.environment["SLURM_CONF"])
        yield made


SLURM = EngineConfig("slurm", workers=2)


def squeue(*options: str) -> dict[str, str]:
    """The state of every job that Slurm knows of, by its id."""
    command = ["squeue", "--noheader", "--array", "--format=%i %T", *options]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(line.split() for line in listed.splitlines())


def running_jobs() -> list[str]:
    return sorted(job for job, state in squeue().items() if state == "RUNNING")


@pytest.mark.engine
def test_slurm_jobs_are_killed_preempted_and_lose_their_node(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, slurm_cluster: Any
) -> None:
    """One worker is killed, one is warned and requeued, and then a node dies."""
    trap.hold()
    with by(SLURM, nine_photographs, tmp_path / "run") as run:
        killed, warned = victims(trap, 2)
        os.kill(killed, signal.SIGKILL)
        [again] = victims(trap, 1, killed, warned)
        jobs = running_jobs()
        assert len(jobs) == 2
        subprocess.run(["scancel", "--signal=USR2", *jobs], check=True)
        requeued = victims(trap, 2, killed, warned, again)
        kill_node(slurm_cluster, "here1")
        until(lambda: list(squeue().values()).count("PENDING") == 1, 90)
        slurm_cluster.start_node("here1")
        victims(trap, 1, killed, warned, again, *requeued)
        trap.release()
        assert run.result().exit_code == 0
    same_rows(here, tmp_path / "run")
    assert len(trap.attacked()) == BLOCKS + 4
    until(lambda: not squeue("--states=PENDING,RUNNING"), 30)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [number for number, _ in SIGNALS])
def test_a_command_that_is_broken_off_leaves_no_job_for_the_next(
    nine_photographs: Path,
    here: Path,
    tmp_path: Path,
    trap: Trap,
    slurm_cluster: Any,
    number: int,
) -> None:
    """Ctrl-C and SIGTERM cancel its jobs; those of a killed command are cancelled by the next."""
    out, options = tmp_path / "run", ["--engine", "slurm", "--workers", "2"]
    broken_off(nine_photographs, out, trap, options, number)
    started = [pid for pid, _ in trap.attacked()]
    if number != signal.SIGKILL:
        until(lambda: not any(map(is_running, started)), 15)
        until(lambda: not squeue("--states=PENDING,RUNNING"), 30)
    with by(SLURM, nine_photographs, out) as run:
        until(lambda: not any(map(is_running, started)), 60)
        trap.release()
        assert run.result().exit_code == 0
    same_rows(here, out)


@pytest.mark.nightly
def test_what_slurm_does_not_do_is_named(
    nine_photographs: Path, tmp_path: Path, trap: Trap, slurm_cluster: Any
) -> None:
    """A partition that is none; a time limit that the partition never gives, which sbatch takes."""
    with pytest.raises(UserError, match="partition"):
        attack(
            nine_photographs, tmp_path / "run", CONFIG, engine=EngineConfig("slurm", partition="x")
        )
    update = ["scontrol", "update", "PartitionName=here"]
    subprocess.run([*update, "MaxTime=5"], check=True)
    try:
        engine = EngineConfig("slurm", workers=2, minutes=10)
        summary = attack(nine_photographs, tmp_path / "run", CONFIG, limit=3, engine=engine)
    finally:
        subprocess.run([*update, "MaxTime=INFINITE"], check=True)
    assert summary.exit_code == 3
    assert "PartitionTimeLimit" in summary.not_done[0]


@pytest.mark.nightly
def test_slurm_here_runs_a_command_and_leaves_nothing(tmp_path: Path, slurm_cluster: Any) -> None:
    folder = tmp_path / "cluster"
    command = [slurm_here().__file__, "--nodes", "2", "--cpus", "1", "--folder", str(folder)]
    shown = [*command, "sh", "-c", "srun --nodes=2 --label hostname; exit 7"]
    ended = subprocess.run(shown, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 7
    assert len(ended.stdout.splitlines()) == 2
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert not any(map(is_running, pids))
