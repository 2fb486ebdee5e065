"""Which engine works, with how many workers and where. Tasks are given to workers until each has
ended or was lost three times, whatever happens; and a worker does those that its file names, keeps
what it has in memory, and tells all of it."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.core.read import read_json
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines import options
from mjp_privacy.experiment.engines import tasks as tasks_module
from mjp_privacy.experiment.engines.options import (
    COPIES,
    OF_A_WORKER,
    EngineConfig,
    engine_config,
    settled,
)
from mjp_privacy.experiment.engines.tasks import (
    ATTEMPTS,
    END,
    NEWS,
    Coordinator,
    Job,
    Task,
    do_task,
    serve,
    task_file,
    write_typed,
)
from mjp_privacy.experiment.work import News, make_plan
from tests.helpers.runs import names, photographs, tiny

# engines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "program", "package", "named"),
    [
        ("ray", "here", None, r"mjp-privacy\[ray\]"),
        ("slurm", "here", None, r"mjp-privacy\[slurm\]"),
        ("slurm", None, None, r"sbatch.*slurm-here"),
        (EngineConfig("slurm", minutes=2), "here", "here", "minutes"),
        (EngineConfig("slurm", gpus_per_task=0.5), "here", "here", "gpus_per_task"),
    ],
)
def test_what_is_not_installed_or_not_possible_is_named(
    engine: Any, program: Any, package: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong on the command line alone stands in tests/inputs."""
    monkeypatch.setattr(options, "find_spec", lambda name: package)
    monkeypatch.setattr("shutil.which", lambda name: program)
    with pytest.raises(UserError, match=named):
        engine_config(engine)


def test_options_go_before_a_sites_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)
    path = Path(__file__).parents[2] / "configs" / "engines" / "slurm.yaml"
    engine = engine_config(EngineConfig(str(path), workers=3, partition="gpu"))
    assert (engine.kind, engine.workers, engine.partition) == ("slurm", 3, "gpu")
    assert engine_config(engine) == engine


# how many -----------------------------------------------------------------------------------------


AUTO, LOCAL = EngineConfig("auto"), EngineConfig("local")
WEIGHTS = 100 << 20
EACH = OF_A_WORKER + COPIES * WEIGHTS
FOUR = {"cores": 4, "gpus": (), "free": 64 << 30}
"""A machine of four cores, without a GPU, with 64 GiB of free memory."""


@pytest.mark.parametrize(
    ("machine", "engine", "images", "becomes"),
    [
        ({}, AUTO, 9, ("local", 4)),
        ({}, AUTO, 1, ("here", None)),  # a small run
        ({"cores": 1}, AUTO, 9, ("here", None)),
        ({"cores": 64}, AUTO, 9, ("local", 15)),  # as many as there are tasks
        ({}, EngineConfig("auto", 2), 1, ("local", 2)),  # asked for
        ({}, LOCAL, 1, ("local", 4)),
        ({"gpus": ("0", "1")}, AUTO, 9, ("local", 2)),
        ({"free": None}, AUTO, 9, ("local", 4)),
        ({}, EngineConfig("ray"), 9, ("ray", None)),  # a cluster's own affair
        ({"free": 5 * EACH // 2}, AUTO, 9, ("local", 2)),  # memory holds fewer
        ({"free": 1}, AUTO, 9, ("here", None)),
        ({"free": 1}, EngineConfig("local", 4), 9, ("local", 4)),  # who asks gets it
    ],
)
def test_how_many_work(
    machine: dict[str, Any],
    engine: EngineConfig,
    images: int,
    becomes: tuple[str, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In ten cells of two models."""
    given = FOUR | machine
    monkeypatch.setattr(options, "cores", lambda: given["cores"])
    monkeypatch.setattr(options, "visible_gpus", lambda: given["gpus"])
    monkeypatch.setattr(options, "free_bytes", lambda device: given["free"])
    records = [ImageRecord(f"{number}.png") for number in range(images)]
    source: Any = SimpleNamespace(recorded=False, records=lambda model: records)
    plan, device = make_plan(load_experiment(tiny()), source), "cuda" if given["gpus"] else "cpu"
    config, remark = settled(engine, plan, WEIGHTS, device)
    assert (config.kind, config.workers) == becomes
    is_short = bool(machine.get("free")) and engine == AUTO
    assert is_short == bool(remark)
    assert not is_short or (f"{config.workers or 1} of 4" in remark and "--workers" in remark)


# tasks --------------------------------------------------------------------------------------------

UNITS = 3  # of a task
MODELS = ["ViT", "MJP", "third"]
Key = tuple[int, ...]
ANYTHING = ("waits", "waits", "waits", "writes", "ends", "fails", "dies", "dies at once")


@dataclass
class Played:
    """An engine whose workers do one of these things each time that they are looked for."""

    folder: Path
    does: Sequence[str] = ("ends",)
    dice: random.Random = field(default_factory=random.Random)
    most: int = 2
    interval: float = 0.0
    doing: dict[int, Task | None] = field(default_factory=dict)  # by worker; None: it has told
    rows: Counter[Key] = field(default_factory=Counter)  # that are on disk
    found: dict[Task, int] = field(default_factory=dict)  # rows that were there before a task
    tried: list[tuple[int, Task]] = field(default_factory=list)
    closed: bool = False

    def start(self, workers: Sequence[int]) -> None:
        assert self.doing.keys().isdisjoint(workers)
        self.doing |= dict.fromkeys(workers)
        assert len(self.doing) <= self.most

    def gone(self) -> Mapping[int, str]:
        gone = {}
        for number in [*self.doing]:
            text = task_file(self.folder / "job.json", number).read_text()
            does = self.dice.choice(self.does)
            if text == END and does != "waits":
                does = "dies at once"
            if does not in ("waits", "dies at once"):
                self.work(number, Task(*map(int, text.split())), does)
            if does.startswith("dies"):
                del self.doing[number]
                gone[number] = "its worker died"
        return gone

    def work(self, number: int, task: Task, does: str, storage: int = 0) -> None:
        if task not in self.found:
            assert task[:3] not in [other[:3] for other in self.doing.values() if other]
            self.doing[number], self.found[task] = task, self.rows[task[:3]]
            self.tried.append((number, task))
        if self.doing[number] is None:
            return
        self.rows[task[:3]] = UNITS if does == "ends" else min(UNITS, self.rows[task[:3]] + 1)
        if does in ("ends", "fails"):
            self.doing[number], found = None, self.found[task]
            error = "" if does == "ends" else "no such attack"
            told = News("ViT a", self.rows[task[:3]] - found, found, error=error, storage=storage)
            write_typed(self.folder / task.file_name, told)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(str(tmp_path), load_experiment(tiny()), "cpu", "ask", str(tmp_path), {})


@pytest.mark.parametrize("seed", range(60))
def test_every_task_is_done_or_named_whatever_workers_do(job: Job, seed: int) -> None:
    """They wait, write, end, fail and die in any order, between looks of the command and tasks that
    come later; in the end every second time, too."""
    dice = random.Random(seed)
    engine = Played(job.path.parent, ANYTHING, dice)
    given, news = list[Task](), list[News]()
    with Coordinator(job, MODELS, engine) as coordinator:
        for look in range(8 * dice.randrange(5) + 1):
            if look % 8 == 0:
                model, start = dice.randrange(3), len(given)
                tasks = [Task(model, start + block, 0) for block in range(dice.randrange(1, 4))]
                given += tasks
                coordinator.submit(tasks)
            news += coordinator.news()
        engine.does = ANYTHING if seed % 2 else ("ends",)
        news += coordinator.wait()
    lost = [each.lost for each in news if each.lost]
    named = {f"{MODELS[task.model]}, block {task.block}": task[:3] for task in given}
    assert len(lost) == len({*lost} & named.keys())
    assert all(name in lost or engine.rows[key] == UNITS for name, key in named.items())
    units = sum(each.units + each.finished for each in news)
    assert units <= sum(engine.rows.values())
    assert lost or units == UNITS * len(given)
    assert max(Counter(task[:3] for _, task in engine.tried).values()) <= ATTEMPTS
    assert engine.closed
    assert not job.path.parent.exists()


@pytest.mark.parametrize("told", [True, False])
def test_a_worker_without_a_disk_ends_the_run(
    job: Job, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Whether it could say so, or died of it."""

    def refused(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(path))

    engine = Played(job.path.parent)
    with Coordinator(job, MODELS, engine) as coordinator:
        coordinator.submit([task := Task(0, 0, 0)])
        engine.work(0, task, "fails" if told else "writes", storage=28)
        if not told:
            monkeypatch.setattr(Path, "write_bytes", refused)
            monkeypatch.setattr(engine, "gone", lambda: {0: "its worker died"})
        with pytest.raises(StorageError):
            list(coordinator.wait())
    assert engine.tried == [(0, task)]


# a worker -----------------------------------------------------------------------------------------


CONFIG = tiny(attacks=[{"name": "grey"}], dtypes=["float32", "float64"])


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A run of six images, two blocks of two models."""
    monkeypatch.chdir(tmp_path)
    images = photographs(tmp_path / "images", 6)
    made = Job(
        *(str(tmp_path / "run"), load_experiment(CONFIG), "cpu", "ask", str(tmp_path), {}),
        images=str(images),
        chosen=tuple(names(6)),
    )
    made.path.parent.mkdir(parents=True)
    write_typed(made.path, made)
    yield made
    tasks_module._worker.cache_clear()


def done(job: Job, *place: int) -> News:
    """What a worker tells of a task that it was given."""
    task = Task(*place)
    do_task(str(job.path), task)
    return read_json(job.path.parent / task.file_name, NEWS, News)


def test_what_is_done_of_a_task_is_told_and_found_by_who_tries_it_again(begun: Job) -> None:
    for attempt, found in (1, (3, 0)), (2, (0, 3)):
        told = done(begun, 0, 0, 1, attempt)
        assert (told.error, told.units, told.finished) == ("", *found)


def test_an_error_is_told_in_the_tasks_file(begun: Job) -> None:
    """A mistake in one line, a fault with its place."""
    Path(str(begun.images), "3.png").unlink()
    told = done(begun, 0, 0, 0)
    assert "3.png" in told.error
    assert "\n" not in told.error
    Path(str(begun.images), "3.png").touch()
    tasks_module._worker.cache_clear()
    assert "Traceback" in done(begun, 9, 0, 0).error


def test_a_machine_that_does_not_see_the_run_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"job\.json"):
        serve(str(tmp_path / "job.json"), 0)
    assert not list(tmp_path.iterdir())


def test_a_worker_that_still_imports_ends_with_its_command(tmp_path: Path) -> None:
    """Nobody holds its standard input; its first heavy import never ends."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    call = "from mjp_privacy.experiment.engines import process; process()"
    program = [sys.executable, "-c", call, "job.json", "0"]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    ended = subprocess.run(
        program, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}, timeout=50
    )
    assert ended.returncode == 0
