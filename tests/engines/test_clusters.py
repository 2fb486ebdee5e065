"""Ray and Slurm on this machine: the rows of one process, whatever dies on the way.

tools/slurm-here starts the Slurm cluster (Debian: apt install slurmctld slurmd slurm-client munge).
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.tasks import LocalEngine
from mjp_privacy.experiment.run import RunSummary
from tests.helpers import runs
from tests.helpers.runs import attack, photographs
from tests.helpers.trap import CONFIG, Trap, children_of, is_running, planted, until

SECONDS = 300  # that an attack may take
BLOCKS = 6  # that the trap attacks in a run
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")


@pytest.fixture(scope="module")
def nine_photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of the classes 0 to 8: three blocks of the tiny configs."""
    return photographs(tmp_path_factory.mktemp("nine_photographs"), 9)


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trap]:
    """The attack `trap`, known to this process and to those that it starts."""
    with (
        pytest.MonkeyPatch.context() as patch,
        planted(tmp_path_factory.mktemp("trap") / "trap", patch) as trap,
    ):
        yield trap


@pytest.fixture(scope="module")
def here(nine_photographs: Path, trap: Trap, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of CONFIG in this process."""
    trap.reset()
    attack(nine_photographs, out := tmp_path_factory.mktemp("here"), CONFIG)
    return out


def same_rows(one: Path, other: Path) -> None:
    """Every row is equal to the last bit, and nothing is left of the workers."""
    runs.same_rows(one, other)
    assert not (other / "work").exists()


def victims(
    trap: Trap, count: int, *before: int, run: Future[RunSummary] | None = None
) -> list[int]:
    """Processes that wait in the attack, apart from those before; clusters start them slowly. The
    error of a run that ended without them is raised at once."""

    def others() -> list[int]:
        if run is not None and run.done():
            run.result()
        pids = {*trap.attacked()} - {*before}
        return [pid for pid in pids if is_running(pid)]

    return until(lambda: pids if len(pids := others()) >= count else None, 300)


@contextmanager
def by(engine: EngineConfig, images: Path, out: Path) -> Iterator[Future[RunSummary]]:
    """The attack in a thread: `with by(TWO, images, out) as run: ...; run.result(SECONDS)`"""
    made: Future[RunSummary] = Future()

    def work() -> None:
        try:
            made.set_result(attack(images, out, CONFIG, engine=engine))
        except BaseException as error:
            made.set_exception(error)

    Thread(target=work, daemon=True).start()
    yield made
    made.exception(SECONDS)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_workers_end_with_their_command_and_the_next_goes_on(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, engine: str, number: int
) -> None:
    if engine == "ray":
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
    path, out, log = (tmp_path / name for name in ("config.yaml", "run", "log"))
    path.write_text(yaml.safe_dump(CONFIG))
    words = ["attack", path, "--images", nine_photographs, "--out", out, "--device", "cpu"]
    words += ["--engine", engine, "--workers", "2"]
    trap.hold()
    with log.open("w") as file:
        running = subprocess.Popen(
            [sys.executable, "-m", "mjp_privacy", *map(str, words)],
            stdout=subprocess.DEVNULL,
            stderr=file,
            env=trap.environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # also in background
        )
    try:
        started = [*victims(trap, 2), *(children_of(running.pid) if engine == "ray" else [])]
        os.kill(running.pid, number)
        code = -9 if number == signal.SIGKILL else 128 + number
        assert running.wait(60) == code
    finally:
        running.kill()
        running.wait()
    assert "Traceback" not in log.read_text()
    assert log.read_text().count("stopped by") == (code > 0)
    until(lambda: not any(map(is_running, started)), 30)
    trap.release()
    assert attack(nine_photographs, out, CONFIG).exit_code == 0
    same_rows(here, out)


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
        assert run.result(SECONDS).exit_code == 0
    same_rows(here, tmp_path / "run")
    assert len(trap.attacked()) == BLOCKS + 1


@needs_ray
@pytest.mark.engine
@pytest.mark.parametrize("address", ["6379", "ray://head:10001", "head:port", None])
def test_an_address_where_no_ray_is(address: str | None, tmp_path: Path) -> None:
    from mjp_privacy.experiment.engines.ray import RayEngine

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        named = address or f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UserError, match=f"--address {named}"):
            RayEngine(EngineConfig("ray", address=named), tmp_path / "job.json", False)


# Slurm --------------------------------------------------------------------------------------------


def kill_node(cluster: Any, name: str) -> None:
    """What a power cut does: the daemon, the processes that watch tasks, and the tasks."""
    cluster.daemons[name].kill()
    of_tasks = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (place / "environ").read_bytes().split(b"\0")
            if f"SLURM_CONF={cluster.folder}/slurm.conf".encode() not in variables:
                continue
            if f"SLURMD_NODENAME={name}".encode() in variables:
                of_tasks.append(int(place.name))
            elif (place / "cmdline").read_bytes().startswith(b"slurmstepd"):
                files = [str(file.readlink()) for file in (place / "fd").iterdir()]
                if f"{cluster.folder}/{name}.log" in files:
                    os.kill(int(place.name), signal.SIGKILL)
    for pid in of_tasks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def slurm_here() -> Any:
    """tools/slurm-here as a module."""
    file = Path(__file__).parents[2] / "tools" / "slurm-here"
    loader = SourceFileLoader("slurm_here", str(file))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # dataclasses look themselves up there
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def slurm_cluster(trap: Trap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of two nodes, each with one CPU; this process is its client."""
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    tool = slurm_here()
    if missing := [name for name in tool.PROGRAMS if not tool.find(name)]:
        pytest.skip(f"`{missing[0]}` is not installed (Debian: slurmctld slurmd slurm-client)")
    with (
        tool.Cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as made,
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
        jobs = [job for job, state in squeue().items() if state == "RUNNING"]
        assert len(jobs) == 2
        subprocess.run(["scancel", "--signal=USR2", *jobs], check=True)
        requeued = victims(trap, 2, killed, warned, again)
        kill_node(slurm_cluster, "here1")
        until(lambda: list(squeue().values()).count("PENDING") == 1, 90)
        slurm_cluster.start_node("here1")
        victims(trap, 1, killed, warned, again, *requeued)
        trap.release()
        assert run.result(SECONDS).exit_code == 0
    same_rows(here, tmp_path / "run")
    assert len(trap.attacked()) == BLOCKS + 4
    until(lambda: not squeue("--states=PENDING,RUNNING"), 30)


# workers of this machine --------------------------------------------------------------------------


TWO = EngineConfig("local", workers=2)


def test_a_killed_worker_changes_nothing(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap
) -> None:
    out = tmp_path / "two"
    trap.hold()
    with by(TWO, nine_photographs, out) as run:
        first = victims(trap, 2)[0]
        os.kill(first, signal.SIGKILL)
        trap.release()
        assert run.result(SECONDS).exit_code == 0
    same_rows(here, out)
    assert len(trap.attacked()) == 7  # three blocks in two cells, and the one of the killed worker
    before = sorted(out.glob("rows/*/*"))
    assert attack(nine_photographs, out, CONFIG).exit_code == 0
    assert sorted(out.glob("rows/*/*")) == before  # nothing was left to be done


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
