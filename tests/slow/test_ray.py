"""A Ray cluster of two nodes on this machine: the rows of one process, whatever dies on the way."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.background import Background
from tests.helpers.command import Command, attack_command
from tests.helpers.runs import attack, rows, same_results, same_rows, tiny
from tests.helpers.trap import Trap, children_of, is_running, until

pytest.importorskip("ray", reason="the extra `ray` is not installed")

import ray
from ray.cluster_utils import Cluster

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines import ray_cluster
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.run import RunSummary

pytestmark = pytest.mark.nightly

CONFIG = tiny(
    dtypes=["float32", "float64"],
    attacks=[{"name": "trap"}, {"name": "april"}, {"name": "patch_gradient"}],
)
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module", autouse=True)
def _quiet(one_thread: None) -> Iterator[None]:
    """A Ray that neither calls home nor speaks of its dashboard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield


@pytest.fixture(scope="module")
def here(
    nine_photographs: Path, planted_trap: Trap, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run in one process."""
    out = tmp_path_factory.mktemp("here")
    attack(nine_photographs, out, CONFIG)
    return out


@pytest.fixture
def trap(planted_trap: Trap, here: Path) -> Iterator[Trap]:
    planted_trap.reset()
    yield planted_trap
    planted_trap.reset()


@pytest.fixture
def cluster(trap: Trap) -> Iterator[Cluster]:
    """A head and a second node, each with one CPU; they know the trap."""
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.add_node(**NODE)
    yield made
    ray.shutdown()
    made.shutdown()


def on(cluster: Cluster, **options: Any) -> EngineConfig:
    return EngineConfig("ray", address=cluster.address, threads=1, **options)


def by_ray(nine_photographs: Path, out: Path, engine: EngineConfig) -> Background[RunSummary]:
    return Background(lambda: attack(nine_photographs, out, CONFIG, engine=engine))


def same(here: Path, out: Path, summary: RunSummary) -> None:
    assert summary.exit_code == 0
    same_results(here, out)


def test_two_nodes_make_what_one_process_makes(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, cluster: Cluster
) -> None:
    trap.hold()
    with by_ray(nine_photographs, tmp_path / "run", on(cluster)) as run:
        trap.victims(2)  # as many as there is room for, without --workers
        trap.release()
        same(here, tmp_path / "run", run.result())
    assert not ray.is_initialized()
    assert len({pid for pid, _ in trap.attacked()}) == 2  # each process did several tasks


def test_a_node_dies(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, cluster: Cluster
) -> None:
    trap.hold()
    with by_ray(nine_photographs, tmp_path / "run", on(cluster, workers=2)) as run:
        victims = trap.victims(2)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        [lost] = until(lambda: [pid for pid in victims if not is_running(pid)])
        trap.release()
        same(here, tmp_path / "run", run.result())
    assert len([pid for pid, _ in trap.attacked() if pid == lost]) == 1
    assert len(trap.attacked()) == len(blocks_of(here)) + 1


def blocks_of(out: Path) -> list[Path]:
    """The files of rows of the trap's cells: one each time that it attacked a block."""
    cells = rows(out).query("attack == 'trap'")["run_id"].unique()
    return [path for run_id in cells for path in (out / "rows" / run_id).glob("[0-9]*")]


def test_a_worker_dies(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, cluster: Cluster
) -> None:
    trap.hold()
    with by_ray(nine_photographs, tmp_path / "run", on(cluster, workers=2)) as run:
        os.kill(trap.victims(2)[0], signal.SIGKILL)
        trap.release()
        same(here, tmp_path / "run", run.result())
    assert len(trap.attacked()) == len(blocks_of(here)) + 1


def test_the_cluster_goes_and_the_run_says_so(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap, cluster: Cluster
) -> None:
    trap.hold()
    options = ["--engine", "ray", "--address", cluster.address, "--threads", "1"]
    command = attack_command(CONFIG, nine_photographs, tmp_path / "run", options, trap.environment)
    with command as running:
        trap.victims(2)
        for node in cluster.list_all_nodes():
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)
        assert running.wait(60) == 2
        assert "The Ray cluster at " in running.errors()
        assert "is gone: its head no longer answers. What was done is kept" in running.errors()
        assert "Traceback" not in running.errors()
    trap.release()
    summary = attack(nine_photographs, tmp_path / "run", CONFIG)
    same(here, tmp_path / "run", summary)


def test_a_task_that_no_machine_has_room_for(
    nine_photographs: Path, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "PATIENCE", 1.0)
    config = EngineConfig("ray", address=cluster.address, threads=64)
    with pytest.raises(UserError, match=r"No machine .* has had 64 CPU\(s\) for 1 s, which a task"):
        attack(nine_photographs, tmp_path / "run", CONFIG, engine=config)
    assert not ray.is_initialized()


# a cluster that is started for the run -----------------------------------------------------------


def raylets_of(command: Command) -> list[int]:
    """Ray's own processes and workers that a command has started."""
    return children_of(command.pid)


@pytest.mark.engine
def test_ray_is_started_for_the_run_and_ends_with_it(
    nine_photographs: Path, here: Path, tmp_path: Path, trap: Trap
) -> None:
    trap.hold()
    options = ["--engine", "ray", "--workers", "2"]
    with attack_command(
        CONFIG, nine_photographs, tmp_path / "run", options, trap.environment
    ) as running:
        workers = trap.victims(2)
        started = [*workers, *raylets_of(running)]
        assert len(started) > 2
        trap.release()
        assert running.wait(120) == 0
        until(lambda: not any(map(is_running, started)), 15)
    same_rows(here, tmp_path / "run")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_workers_end_with_the_command(
    nine_photographs: Path,
    here: Path,
    tmp_path: Path,
    trap: Trap,
    number: signal.Signals,
    code: int,
) -> None:
    trap.hold()
    options = ["--engine", "ray", "--workers", "2"]
    with attack_command(
        CONFIG, nine_photographs, tmp_path / "run", options, trap.environment
    ) as running:
        started = [*trap.victims(2), *raylets_of(running)]
        os.kill(running.pid, number)
        assert running.wait(30) == code
        until(lambda: not any(map(is_running, started)), 15)
        assert running.errors().count("stopped by") == (code > 0)
        assert "Traceback" not in running.errors()
    trap.release()
    same(here, tmp_path / "run", attack(nine_photographs, tmp_path / "run", CONFIG))
