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
from mjp_privacy.experiment.engines.coordinator import ATTEMPTS, Coordinator, News, TaskLost
from mjp_privacy.experiment.engines.worker import (
    END,
    Job,
    Task,
    TaskReport,
    task_file,
    write_typed,
)
from mjp_privacy.experiment.work import CellDone
from tests.helpers.runs import tiny

EXPERIMENT = load_experiment(tiny())
UNITS = 3  # of a task
MODELS = ["ViT", "MJP", "third"]


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
    rows: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # that are on disk
    tried: dict[int, list[Task]] = field(default_factory=dict)  # by worker
    dead: dict[int, str] = field(default_factory=dict)
    closed: bool = False
    working: bool = False  # every worker does its work whenever it is looked for
    deadly: int | None = None  # a block that ends whoever works on it

    def start(self, workers: Sequence[int]) -> None:
        for number in workers:
            assert number not in self.workers
            self.workers[number] = Worker()

    def gone(self) -> Mapping[int, str]:
        for number in sorted(self.workers) if self.working else ():
            worker = self.look(number)
            if worker is None or worker.ended:
                continue
            if worker.task and worker.task.block == self.deadly:
                self.die(number)
            else:
                self.end(worker)
        gone, self.dead = self.dead, {}
        return gone

    def close(self) -> None:
        self.closed = True

    def look(self, number: int) -> Worker | None:
        """The worker after it has read its file; None: it was told to end."""
        text = task_file(self.folder / "job.json", number).read_text()
        if text == END:
            self.die(number, "it ended")
            return None
        task = Task(*map(int, text.split()))
        if self.workers[number].task != task:
            self.workers[number] = Worker(task, finished=self.rows[task.key])
            self.tried.setdefault(number, []).append(task)
        return self.workers[number]

    def write_row(self, worker: Worker) -> None:
        assert worker.task is not None
        if self.rows[worker.task.key] < UNITS:
            self.rows[worker.task.key] += 1
            worker.units += 1

    def end(self, worker: Worker, error: str = "", storage: int = 0) -> None:
        assert worker.task is not None
        while not error and self.rows[worker.task.key] < UNITS:
            self.write_row(worker)
        worker.ended = True
        done = CellDone(worker.units, "ViT a float32", worker.finished)
        report = TaskReport(done, error=error, storage=storage)
        write_typed(self.folder / worker.task.file_name, report)

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
        self.lost: list[TaskLost] = []

    @rule(model=st.integers(0, 2), blocks=st.integers(1, 3))
    def submit(self, model: int, blocks: int) -> None:
        start = len(self.given)
        tasks = [Task(model, start + block, 0) for block in range(blocks)]
        self.given += tasks
        self.coordinator.submit(tasks)

    def some_worker(self, at: int) -> Worker | None:
        numbers = sorted(self.engine.workers)
        worker = self.engine.look(numbers[at % len(numbers)])
        return None if worker is None or worker.ended else worker

    @precondition(lambda self: self.engine.workers)
    @rule(at=st.integers(0, 9))
    def write(self, at: int) -> None:
        if worker := self.some_worker(at):
            self.engine.write_row(worker)

    @precondition(lambda self: self.engine.workers)
    @rule(at=st.integers(0, 9), error=st.sampled_from(["", "", "no such attack"]))
    def end(self, at: int, error: str) -> None:
        if worker := self.some_worker(at):
            self.engine.end(worker, error)

    @precondition(lambda self: self.engine.workers)
    @rule(at=st.integers(0, 9), begins=st.booleans())
    def die(self, at: int, begins: bool) -> None:
        number = sorted(self.engine.workers)[at % len(self.engine.workers)]
        if begins and self.engine.look(number) is None:
            return
        self.engine.die(number)

    @rule()
    def news(self) -> None:
        self.hear(list(self.coordinator.news()))

    def hear(self, news: Sequence[News]) -> None:
        self.lost += [each for each in news if isinstance(each, TaskLost)]
        self.units += sum(e.units + e.finished for e in news if isinstance(e, CellDone))

    @invariant()
    def nobody_does_what_another_does(self) -> None:
        open_tasks = [w.task for w in self.engine.workers.values() if w.task and not w.ended]
        assert len(open_tasks) == len({task.key for task in open_tasks})
        tried = Counter(task.key for tasks in self.engine.tried.values() for task in tasks)
        assert max(tried.values(), default=0) <= ATTEMPTS
        assert self.units <= sum(self.engine.rows.values())
        assert len(self.engine.workers) <= self.engine.most

    def teardown(self) -> None:
        """From now on every worker does its work."""
        self.engine.working = True
        self.hear(list(self.coordinator.wait()))
        named = Counter((MODELS.index(lost.model), lost.block) for lost in self.lost)
        for task in self.given:
            if named[task.model, task.block]:
                assert named.pop((task.model, task.block)) == 1
            else:
                assert self.engine.rows[task.key] == UNITS
        assert not named
        assert self.units <= UNITS * len(self.given)
        if not self.lost:
            assert self.units == UNITS * len(self.given)
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


def run(job: Job, engine: Played, tasks: Sequence[Task]) -> list[News]:
    """What is told of tasks whose workers work."""
    engine.working = True
    with Coordinator(job, MODELS, engine) as coordinator:
        coordinator.submit(tasks)
        return list(coordinator.wait())


def test_a_worker_gets_tasks_of_the_block_and_the_model_that_it_has(job: Job) -> None:
    """Two models of two blocks and three groups: each worker has one of the models."""
    engine = Played(job.path.parent)
    run(job, engine, [Task(m, b, g) for m in range(2) for b in range(2) for g in range(3)])
    for number in range(2):
        own = [(task.model, task.block) for task in engine.tried[number]]
        assert own == [(number, 0)] * 3 + [(number, 1)] * 3


def test_a_task_that_kills_every_worker_is_named_and_the_others_are_done(job: Job) -> None:
    engine = Played(job.path.parent, deadly=1)
    news = run(job, engine, [Task(0, block, 0) for block in range(3)])
    lost = [each for each in news if isinstance(each, TaskLost)]
    assert [(each.model, each.block) for each in lost] == [("ViT", 1)]
    assert "its worker died" in lost[0].reason
    assert [engine.rows[0, block, 0] for block in range(3)] == [UNITS, 0, UNITS]
    tried = [task.attempt for tasks in engine.tried.values() for task in tasks if task.block == 1]
    assert sorted(tried) == [1, 2, 3]


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
