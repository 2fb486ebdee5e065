"""Tasks are given to workers until each has ended or was lost three times, whatever happens."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mjp_privacy.core.errors import StorageError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines.coordinator import ATTEMPTS, Coordinator
from mjp_privacy.experiment.engines.worker import END, Job, Task, task_file, write_typed
from mjp_privacy.experiment.work import News
from tests.helpers.runs import tiny

EXPERIMENT = load_experiment(tiny())
UNITS = 3  # of a task
MODELS = ["ViT", "MJP", "third"]
Key = tuple[int, ...]


@dataclass
class Worker:
    """A worker as a test plays it: it reads its file, writes rows and tells when it is over."""

    task: Task | None = None
    units: int = 0  # rows that it wrote of its task, and those that it found
    finished: int = 0
    ended: bool = False


@dataclass
class Played:
    """An engine whose workers do what the test says."""

    folder: Path
    most: int = 2
    interval: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    rows: Counter[Key] = field(default_factory=Counter)  # that are on disk
    tried: dict[int, list[Task]] = field(default_factory=dict)  # by worker
    dead: dict[int, str] = field(default_factory=dict)
    closed: bool = False
    working: bool = False  # every worker does its work whenever it is looked for

    def start(self, workers: Sequence[int]) -> None:
        for number in workers:
            assert number not in self.workers
            self.workers[number] = Worker()

    def gone(self) -> Mapping[int, str]:
        for number in sorted(self.workers) if self.working else ():
            if (worker := self.look(number)) is not None:
                self.end(worker)
        gone, self.dead = self.dead, {}
        return gone

    def close(self) -> None:
        self.closed = True

    def look(self, number: int) -> Worker | None:
        """The worker after it has read its file; None: it was told to end, or has done its task."""
        text = task_file(self.folder / "job.json", number).read_text()
        if text == END:
            self.die(number, "it ended")
            return None
        task = Task(*map(int, text.split()))
        if self.workers[number].task != task:
            self.workers[number] = Worker(task, finished=self.rows[task[:3]])
            self.tried.setdefault(number, []).append(task)
        return None if self.workers[number].ended else self.workers[number]

    def write_row(self, worker: Worker) -> None:
        assert worker.task is not None
        if self.rows[worker.task[:3]] < UNITS:
            self.rows[worker.task[:3]] += 1
            worker.units += 1

    def end(self, worker: Worker, error: str = "", storage: int = 0) -> None:
        assert worker.task is not None
        while not error and self.rows[worker.task[:3]] < UNITS:
            self.write_row(worker)
        worker.ended = True
        told = News("ViT a", worker.units, worker.finished, error=error, storage=storage)
        write_typed(self.folder / worker.task.file_name, told)

    def die(self, number: int, reason: str = "its worker died") -> None:
        del self.workers[number]
        self.dead[number] = reason


class Run(RuleBasedStateMachine):
    """Workers begin, write, end, fail and die in any order, between looks of the command."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.TemporaryDirectory()
        self.job = Job(self.root.name, EXPERIMENT, "cpu", "ask", self.root.name, {})
        self.engine = Played(self.job.path.parent)
        self.coordinator = Coordinator(self.job, MODELS, self.engine)
        self.coordinator.__enter__()
        self.given: list[Task] = []
        self.units: int = 0
        self.lost: list[str] = []

    @rule(model=st.integers(0, 2), blocks=st.integers(1, 3))
    def submit(self, model: int, blocks: int) -> None:
        start = len(self.given)
        tasks = [Task(model, start + block, 0) for block in range(blocks)]
        self.given += tasks
        self.coordinator.submit(tasks)

    @precondition(lambda self: self.engine.workers)
    @rule(at=st.integers(0, 9), does=st.sampled_from(["writes", "ends", "ends", "fails", "dies"]))
    def work(self, at: int, does: str) -> None:
        number = sorted(self.engine.workers)[at % len(self.engine.workers)]
        if does == "dies" and at % 2:  # before it has read its file
            self.engine.die(number)
        elif (worker := self.engine.look(number)) is not None:
            if does == "dies":
                self.engine.die(number)
            elif does == "writes":
                self.engine.write_row(worker)
            else:
                self.engine.end(worker, "no such attack" if does == "fails" else "")

    @rule()
    def news(self) -> None:
        self.hear(list(self.coordinator.news()))

    def hear(self, news: Sequence[News]) -> None:
        self.lost += [each.lost for each in news if each.lost]
        self.units += sum(each.units + each.finished for each in news)

    @invariant()
    def nobody_does_what_another_does(self) -> None:
        doing = [w.task[:3] for w in self.engine.workers.values() if w.task and not w.ended]
        assert len(doing) == len({*doing})
        tried = Counter(task[:3] for tasks in self.engine.tried.values() for task in tasks)
        assert max(tried.values(), default=0) <= ATTEMPTS
        assert self.units <= sum(self.engine.rows.values())
        assert len(self.engine.workers) <= self.engine.most

    def teardown(self) -> None:
        """From now on every worker does its work."""
        self.engine.working = True
        self.hear(list(self.coordinator.wait()))
        named = {f"{MODELS[task.model]}, block {task.block}": task[:3] for task in self.given}
        assert len(self.lost) == len({*self.lost} & named.keys())
        for name, key in named.items():
            assert name in self.lost or self.engine.rows[key] == UNITS
        assert self.units <= UNITS * len(self.given)
        assert self.lost or self.units == UNITS * len(self.given)
        self.coordinator.__exit__(None, None, None)
        assert self.engine.closed
        assert not self.job.path.parent.exists()
        self.root.cleanup()


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


# cases --------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(str(tmp_path), EXPERIMENT, "cpu", "ask", str(tmp_path), {})


def test_a_worker_gets_tasks_of_the_block_and_the_model_that_it_has(job: Job) -> None:
    """Two models of two blocks and three groups: each worker has one of the models."""
    engine = Played(job.path.parent)
    engine.working = True
    with Coordinator(job, MODELS, engine) as coordinator:
        coordinator.submit([Task(m, b, g) for m in range(2) for b in range(2) for g in range(3)])
        list(coordinator.wait())
    for number in range(2):
        own = [task[:2] for task in engine.tried[number]]
        assert own == [(number, 0)] * 3 + [(number, 1)] * 3


@pytest.mark.parametrize("told", [True, False])
def test_a_worker_without_a_disk_ends_the_run(
    job: Job, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Whether it could say so, or died of it."""

    def refused(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(path))

    engine = Played(job.path.parent)
    with Coordinator(job, MODELS, engine) as coordinator:
        coordinator.submit([Task(0, 0, 0)])
        worker = engine.look(0)
        assert worker is not None
        if told:
            engine.end(worker, "RUN/rows/a.parquet cannot be written", 28)
        else:
            monkeypatch.setattr(Path, "write_bytes", refused)
            engine.die(0)
        with pytest.raises(StorageError):
            list(coordinator.wait())
    assert [len(tasks) for tasks in engine.tried.values()] == [1]
