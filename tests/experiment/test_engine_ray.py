"""What the engine `ray` says where no cluster answers, and how it counts; no cluster is started."""

import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.engines import ray_cluster, ray_connection
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.engines.ray_cluster import RayEngine, death
from mjp_privacy.experiment.engines.ray_connection import RayConnection
from mjp_privacy.experiment.job import Task

JOB = Path("run") / "work" / "job.json"


def refusal(address: str) -> str:
    with pytest.raises(UserError) as raised:
        RayConnection.open(address, cpus=1, gpus=0)
    return str(raised.value)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"not installed: expected pip install .*\[ray\]"):
        RayEngine.of(EngineConfig("ray"), JOB, threads=1, on_gpu=False)


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")


@needs_ray
@pytest.mark.parametrize("address", ["6379", "head", "ray://head:10001", "head:port"])
def test_an_address_that_is_none(address: str) -> None:
    said = refusal(address)
    assert said.startswith("--address: expected auto or HOST:PORT of a Ray cluster's head, got ")
    assert address in said


@needs_ray
def test_gpus_for_tasks_of_the_cpu_are_refused() -> None:
    with pytest.raises(UserError, match=r"gpus_per_task: this command computes on the CPU, so its"):
        RayEngine.of(EngineConfig("ray", gpus_per_task=1), JOB, threads=1, on_gpu=False)


@needs_ray
def test_nobody_listens_at_an_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        started = time.monotonic()
        said = refusal(address)
    assert f"--address {address}: no Ray cluster could be used there (no answer). Expected" in said
    assert "`ray start --address HOST:PORT` makes this machine one" in said
    assert time.monotonic() - started < 60  # Ray alone would try for minutes


@needs_ray
def test_what_ray_says_of_a_cluster_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuses(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nand more")

    monkeypatch.setattr(ray, "init", refuses)
    assert "--address auto: no Ray cluster could be used there (Could not find any" in refusal(
        "auto"
    )
    with pytest.raises(UserError, match=r"Ray could not be started on this machine \(Could not"):
        RayConnection.open(None, cpus=1, gpus=0)


@pytest.mark.parametrize(
    ("node", "cpus", "gpus", "room"),
    [
        ({"CPU": 8.0}, 3, 0, 2),
        ({"CPU": 8.0}, 1, 1, 0),
        ({"CPU": 8.0, "GPU": 2.0}, 1, 1, 2),
        ({"CPU": 8.0, "GPU": 2.0}, 1, 0.3, 6),  # three a GPU
        ({"CPU": 3.0, "GPU": 4.0}, 1, 0.5, 3),
        ({"CPU": 8.0, "GPU": 4.0}, 1, 2, 2),
        ({}, 1, 0, 0),
    ],
)
def test_room_on_a_machine(node: dict[str, float], cpus: int, gpus: float, room: int) -> None:
    assert ray_connection._room(node, cpus, gpus) == room


def deaths() -> list[tuple[Any, str]]:
    from ray import exceptions

    def task(cause: Exception) -> Any:
        return exceptions.RayTaskError("do_task", "", cause)

    missing = ModuleNotFoundError("No module named 'mjp_privacy'")
    return [
        (exceptions.WorkerCrashedError(), "its worker was killed"),
        (exceptions.NodeDiedError("n"), "its machine died"),
        (exceptions.OutOfMemoryError("m"), "its worker was ended because its machine was out of"),
        (exceptions.ObjectStoreFullError("f"), "Ray ended it with ObjectStoreFullError"),
        (exceptions.TaskCancelledError(), "it was cancelled"),
        (task(FileNotFoundError("x")), f"its machine does not see {JOB.parent}: expected a file"),
        (task(missing), "its machine cannot import mjp_privacy (No module named 'mjp_privacy')"),
        (task(PermissionError("no")), "its worker ended with PermissionError: no"),
    ]


@needs_ray
def test_every_death_has_words() -> None:
    for error, words in deaths():
        assert death(error, JOB.parent).startswith(words)


class Cluster:
    """Stands in for a cluster: tasks end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int = 2) -> None:
        import ray

        self.room, self.there = room, True
        self.given: list[tuple[Any, ...]] = []
        self.over: list[int] = []
        monkeypatch.setattr(RayConnection, "open", lambda *_: self)
        monkeypatch.setattr(ray_cluster, "LOOK", 0.0)
        monkeypatch.setattr(RayEngine, "_remote", lambda _: self)
        monkeypatch.setattr(ray, "wait", self.ended)
        monkeypatch.setattr(ray, "get", lambda _: None)

    head = "head:6379"

    def remote(self, *arguments: Any) -> int:
        self.given.append(arguments)
        return len(self.given) - 1

    def ended(self, references: list[int], **_: Any) -> tuple[list[int], list[int]]:
        return [number for number in references if number in self.over], []

    def is_there(self) -> bool:
        return self.there

    def room_for(self, cpus: int, gpus: float) -> int:
        return self.room


TASKS = [Task(0, block) for block in range(5)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    return Cluster(monkeypatch)


def engine(**options: Any) -> RayEngine:
    return RayEngine.of(EngineConfig("ray", **options), JOB, threads=1, on_gpu=False)


def test_only_a_path_and_numbers_are_sent(cluster: Cluster) -> None:
    engine(workers=1).submit(TASKS[3:])
    assert cluster.given == [(str(JOB), 0, 3, 1)]


def test_as_many_tasks_are_under_way_as_there_is_room_for(cluster: Cluster) -> None:
    ours = engine()
    ours.submit(TASKS)
    assert len(cluster.given) == 2
    cluster.room = 3  # a machine came
    assert not ours.lost()
    assert len(cluster.given) == 3
    cluster.over = [0, 1]
    assert not ours.lost()
    assert len(cluster.given) == 5


def test_what_a_task_wrote_must_be_seen_here(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "SETTLE", 0.0)
    ours = engine()
    ours.submit(TASKS[:1])
    cluster.over = [0]
    [(task, reason)] = ours.lost() or ours.lost()
    assert task == TASKS[0]
    assert reason.startswith("its worker ended, but what it wrote is not in run/work: expected")
    assert not ours.lost()


def test_a_cluster_that_is_gone_ends_the_run(cluster: Cluster) -> None:
    ours = engine()
    ours.submit(TASKS)
    cluster.there = False
    with pytest.raises(UserError, match=r"The Ray cluster at head:6379 is gone: .* is kept; start"):
        ours.lost()


def test_without_room_it_waits_and_then_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.room = 0
    ours = engine(workers=2)
    ours.submit(TASKS)
    monkeypatch.setattr(ray_cluster, "PATIENCE", 0.0)
    with pytest.raises(UserError, match=r"No machine .* has had 1 CPU\(s\) for 0 s, which a task"):
        ours.lost()
