"""Tasks are given to workers until each has ended or was lost three times, whatever happens."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mjp_privacy.core.errors import StorageError
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines.coordinator import ATTEMPTS, Coordinator, TaskLost
from mjp_privacy.experiment.engines.worker import END, Job, Task, TaskReport, task_file
from mjp_privacy.experiment.work import CellDone
from tests.helpers.runs import tiny

EXPERIMENT = load_experiment(tiny())
UNITS = 3  # of a task
MODELS = ["ViT", "MJP", "third"]


@dataclass
class Worker:
    """A worker as a test plays it: it reads its file, writes rows and tells of them."""

    number: int
    task: Task | None = None
    report: TaskReport = field(default_factory=TaskReport)


@dataclass
class Played:
    """An engine whose workers do what the test says."""

    folder: Path
    most: int = 2
    interval: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    rows: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # that are on disk
    tried: list[Task] = field(default_factory=list)
    dead: dict[int, str] = field(default_factory=dict)
    tried_by: dict[int, list[Task]] = field(default_factory=dict)
    closed: bool = False
    working: bool = False  # every worker does its work whenever it is looked for
    deadly: int | None = None  # a block that ends whoever works on it

    def start(self, workers: Sequence[int]) -> None:
        for number in workers:
            assert number not in self.workers
            self.workers[number] = Worker(number)

    def gone(self) -> Mapping[int, str]:
        for number in sorted(self.workers) if self.working else ():
            worker = self.look(number)
            if worker is None or worker.report.ended:
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
        worker = self.workers[number]
        text = task_file(self.folder / "job.json", number).read_text()
        if text == END:
            self.die(number, "it ended")
            return None
        task = Task(*map(int, text.split()))
        if worker.task != task:
            worker.task = task
            worker.report = TaskReport()  # it tells this first, and then what it finds
            self.tell(worker)
            worker.report = TaskReport(finished=self.rows[task.key], where="ViT a float32")
            self.tried.append(task)
            self.tried_by.setdefault(number, []).append(task)
        return worker

    def tell(self, worker: Worker) -> None:
        assert worker.task is not None
        worker.report.write(self.folder / worker.task.file_name)

    def write_row(self, worker: Worker) -> None:
        assert worker.task is not None
        if self.rows[worker.task.key] < UNITS:
            self.rows[worker.task.key] += 1
            worker.report = replace(worker.report, units=worker.report.units + 1)

    def end(self, worker: Worker, error: str = "", storage: int = 0) -> None:
        while not error and worker.task and self.rows[worker.task.key] < UNITS:
            self.write_row(worker)
        worker.report = replace(worker.report, ended=True, error=error, storage=storage)
        self.tell(worker)

    def die(self, number: int, reason: str = "its worker died") -> None:
        del self.workers[number]
        self.dead[number] = reason


class Unwritten(Job):
    """Nobody reads its file."""

    def write(self) -> None:
        pass


class Run(RuleBasedStateMachine):
    """Workers begin, write, tell, end, fail and die in any order, between looks of the command."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.TemporaryDirectory()
        self.job = Unwritten(self.root.name, EXPERIMENT, "cpu", "ask", self.root.name, {})
        self.engine = Played(self.job.path.parent)
        self.coordinator = Coordinator(self.job, MODELS, self.engine)
        self.coordinator.__enter__()
        self.given: list[Task] = []
        self.failed: set[tuple[int, int, int]] = set()  # by an error that was told
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
        return None if worker is None or worker.report.ended else worker

    @precondition(lambda self: self.engine.workers)
    @rule(at=st.integers(0, 9), tells=st.booleans())
    def write(self, at: int, tells: bool) -> None:
        if worker := self.some_worker(at):
            self.engine.write_row(worker)
            if tells:
                self.engine.tell(worker)

    @precondition(lambda self: self.engine.workers)
    @rule(at=st.integers(0, 9), error=st.sampled_from(["", "", "no such attack"]))
    def end(self, at: int, error: str) -> None:
        if worker := self.some_worker(at):
            assert worker.task is not None
            self.engine.end(worker, error)
            self.failed |= {worker.task.key} if error else set()

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

    def hear(self, news: Sequence[CellDone | TaskLost]) -> None:
        for each in news:
            if isinstance(each, TaskLost):
                self.lost.append(each)
            else:
                assert each.units >= 0
                assert each.finished >= 0
                self.units += each.units + each.finished

    @invariant()
    def nobody_does_what_another_does(self) -> None:
        open_tasks = [w.task for w in self.engine.workers.values() if w.task and not w.report.ended]
        assert len(open_tasks) == len({task.key for task in open_tasks})
        assert max(Counter(task.key for task in self.engine.tried).values(), default=0) <= ATTEMPTS
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


def run(job: Job, engine: Played, tasks: Sequence[Task]) -> list[CellDone | TaskLost]:
    """What is told of tasks whose workers work."""
    engine.working = True
    with Coordinator(job, MODELS, engine) as coordinator:
        coordinator.submit(tasks)
        news = list(coordinator.wait())
    assert engine.closed
    return news


def test_a_worker_gets_tasks_of_the_block_and_the_model_that_it_has(job: Job) -> None:
    """Two models of two blocks and three groups: each worker has one of the models."""
    tasks = [Task(m, b, g) for m in range(2) for b in range(2) for g in range(3)]
    engine = Played(job.path.parent)
    run(job, engine, tasks)
    for number in range(2):
        own = [(task.model, task.block) for task in engine.tried_by[number]]
        assert own == [(number, 0)] * 3 + [(number, 1)] * 3


def test_a_task_that_kills_every_worker_is_named_and_the_others_are_done(job: Job) -> None:
    engine = Played(job.path.parent, deadly=1)
    news = run(job, engine, [Task(0, block, 0) for block in range(3)])
    lost = [each for each in news if isinstance(each, TaskLost)]
    assert [(each.model, each.block) for each in lost] == [("ViT", 1)]
    assert "its worker died" in lost[0].reason
    assert [engine.rows[0, block, 0] for block in range(3)] == [UNITS, 0, UNITS]
    assert [task.attempt for task in engine.tried if task.block == 1] == [1, 2, 3]


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
    assert len(engine.tried) == 1
