"""What is heard of workers is passed on once, however often their tasks start anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mjp_privacy.experiment.messages import (
    BlockSkipped,
    CellDone,
    Message,
    ModelOpened,
    TaskEnded,
    line_of,
)

from mjp_privacy.core.errors import StorageError
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.engines.coordinator import Coordinator, TaskLost
from mjp_privacy.experiment.engines.worker import do_task
from mjp_privacy.experiment.job import Job, Task
from tests.helpers.runs import tiny

OPENED = ModelOpened("ViT", [], None, "a test")
Happening = Callable[[], "Sequence[tuple[Task, str]] | None"]


@dataclass
class Played:
    """An engine to which something happens at each look: a worker speaks, or is lost."""

    happenings: Sequence[Happening]
    interval: float = 0.0
    given: list[list[Task]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._next = iter(self.happenings)

    def submit(self, tasks: Sequence[Task]) -> None:
        self.given.append(list(tasks))

    def lost(self) -> Sequence[tuple[Task, str]]:
        return next(self._next)() or ()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(str(tmp_path), load_experiment(tiny()), "cpu", 1, False, str(tmp_path))


def done(run_id: str, units: int) -> CellDone:
    return CellDone(run_id, "ViT", "a", "float32", 0, units, units)


def says(job: Job, task: Task, start: int, *messages: Message) -> Happening:
    """A worker's file holds these messages, too."""

    def speak() -> None:
        with (job.path.parent / task.file_name(start)).open("a") as file:
            file.writelines(map(line_of, messages))

    return speak


def loses(*tasks: Task) -> Happening:
    return lambda: [(task, "its worker died") for task in tasks]


def test_a_worker_without_a_disk_ends_the_run(job: Job) -> None:
    task = Task(0, 0)
    full = TaskEnded("RUN/rows/a.parquet cannot be written (no space left on device)", 28)
    engine = Played([says(job, task, 1, full)])
    with pytest.raises(StorageError, match=r"a\.parquet cannot be written \(no space.*Free some"):
        heard(job, engine, [task, Task(0, 1)])
    assert engine.closed


def test_a_worker_that_could_not_say_so_has_its_disk_tried(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(path))

    task = Task(0, 0)

    def fills() -> Sequence[tuple[Task, str]]:
        monkeypatch.setattr(Path, "write_bytes", refused)
        return [(task, "worker 0 ended with code 1")]

    engine = Played([fills])
    with pytest.raises(StorageError, match=r"cannot be written \(no space left on device\)"):
        heard(job, engine, [task])
    assert engine.closed
    assert engine.given == [[task]]  # and not once more


def heard(job: Job, engine: Played, tasks: Sequence[Task]) -> list[Message | TaskLost]:
    told = list(Coordinator(job, ["ViT"], engine).messages(tasks))
    assert engine.closed
    assert not job.path.parent.exists()
    return told


def units(told: Sequence[Message | TaskLost]) -> list[int]:
    return [each.units for each in told if isinstance(each, BlockSkipped | CellDone)]


FIRST = Task(0, 0)
SECOND = Task(0, 1)


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_second_start_counts_what_the_first_did_not_tell(job: Job, attempt: int) -> None:
    """Of ten units two were finished before. The first start told of three more and wrote two that
    it did not live to tell of; its last line is half."""
    again = Task(0, 0, attempt)

    def half() -> None:
        with (job.path.parent / FIRST.file_name(1)).open("a") as file:
            file.write(line_of(done("other", 2))[:20])

    engine = Played(
        [
            says(job, FIRST, 1, OPENED, BlockSkipped(2), done("one", 3)),
            half,
            loses(FIRST) if attempt == 2 else lambda: None,
            says(job, again, 3 - attempt, OPENED, BlockSkipped(7), done("third", 3)),
            says(job, again, 3 - attempt, TaskEnded()),
        ]
    )
    told = heard(job, engine, [FIRST])
    assert told == [OPENED, BlockSkipped(2), done("one", 3), BlockSkipped(2), done("third", 3)]
    assert engine.given == [[FIRST], [again]][:attempt]


def test_units_that_failed_and_are_done_again_count_once(job: Job) -> None:
    engine = Played(
        [
            says(job, FIRST, 1, BlockSkipped(0), done("one", 3)),
            says(job, FIRST, 2, BlockSkipped(2), done("one", 1), done("other", 3), TaskEnded()),
        ]
    )
    assert units(heard(job, engine, [FIRST])) == [0, 3, 0, 0, 3]


def test_lost_tasks_are_given_again_together(job: Job) -> None:
    again = [FIRST.once_more(), SECOND.once_more()]
    engine = Played([loses(FIRST, SECOND), *(says(job, task, 1, TaskEnded()) for task in again)])
    assert not heard(job, engine, [FIRST, SECOND])
    assert engine.given == [[FIRST, SECOND], again]


def test_a_task_that_answered_is_not_lost(job: Job) -> None:
    def both() -> Sequence[tuple[Task, str]]:
        says(job, FIRST, 1, BlockSkipped(1), TaskEnded())()
        return [(FIRST, "its worker died")]

    engine = Played([both])
    assert units(heard(job, engine, [FIRST])) == [1]
    assert engine.given == [[FIRST]]


def test_a_try_that_was_given_up_is_not_heard(job: Job) -> None:
    engine = Played(
        [
            loses(FIRST),
            says(job, FIRST, 1, done("one", 3), TaskEnded()),
            says(job, FIRST.once_more(), 1, done("one", 3), TaskEnded()),
        ]
    )
    assert units(heard(job, engine, [FIRST])) == [3]


def test_every_start_of_a_task_has_a_file_of_its_own(job: Job) -> None:
    """No run is at this path, so each start ends with an error, which it tells."""
    job.path.parent.mkdir(parents=True)
    for _ in range(2):
        do_task(str(job.path), 0, 0)
    first, second = sorted(job.path.parent.glob("*.jsonl"))
    assert [file.name for file in (first, second)] == ["0-0.1.1.jsonl", "0-0.1.2.jsonl"]
    assert {Task.of_file(file.name) for file in (first, second)} == {FIRST}
    assert "FileNotFoundError" in first.read_text()
