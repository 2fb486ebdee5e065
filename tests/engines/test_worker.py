"""A worker does the tasks that its file names, keeps what it has in memory, and tells all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_json
from mjp_privacy.data import ImageRecord
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines import worker as worker_module
from mjp_privacy.experiment.engines.worker import (
    REPORT,
    Job,
    Task,
    TaskReport,
    do_task,
    serve,
    write_typed,
)
from mjp_privacy.experiment.simulated import SimulatedUploads
from mjp_privacy.experiment.work import OpenModel
from tests.helpers.runs import photographs, tiny

CONFIG = tiny(attacks=[{"name": "grey"}], dtypes=["float32", "float64"])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A run of six images, two blocks of two models."""
    monkeypatch.chdir(tmp_path)
    images = photographs(tmp_path / "images", 6)
    (tmp_path / "run").mkdir()
    chosen = tuple(f"{number}.png" for number in range(6))
    made = Job(
        *(str(tmp_path / "run"), load_experiment(CONFIG), "cpu", "ask", str(tmp_path), {}),
        images=str(images),
        chosen=chosen,
    )
    made.path.parent.mkdir()
    write_typed(made.path, made)
    yield made
    worker_module._worker.cache_clear()


def told(job: Job, task: Task) -> TaskReport:
    return read_json(job.path.parent / task.file_name, REPORT, TaskReport)


def test_the_model_and_the_block_are_read_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, read, of, block_of = [], [], OpenModel.of, SimulatedUploads.read

    def of_name(plan: Any, source: Any, name: str) -> OpenModel:
        opened.append(name)
        return of(plan, source, name)

    def of_block(self: SimulatedUploads, records: Sequence[ImageRecord]) -> None:
        read.append(len(read))
        block_of(self, records)

    monkeypatch.setattr(OpenModel, "of", of_name)
    monkeypatch.setattr(SimulatedUploads, "read", of_block)
    for task in [Task(0, 0, 0), Task(0, 0, 1), Task(0, 1, 0), Task(1, 0, 0)]:
        do_task(str(job.path), *task.key)
        report = told(job, task)
        assert not report.error
        assert report.done.units == 3
    assert opened == ["ViT", "MJP"]
    assert len(read) == 3


def test_a_task_that_is_given_again_finds_what_is_there(job: Job) -> None:
    do_task(str(job.path), 0, 0, 0)
    do_task(str(job.path), 0, 0, 0, attempt=2)
    first, again = told(job, Task(0, 0, 0)).done, told(job, Task(0, 0, 0, 2)).done
    assert (again.units, again.finished) == (0, first.units)


def test_an_error_is_told_in_the_tasks_file(job: Job) -> None:
    """A mistake in one line, a fault with its place."""
    Path(str(job.images), "3.png").unlink()
    do_task(str(job.path), 0, 0, 0)
    report = told(job, Task(0, 0, 0))
    assert "3.png" in report.error
    assert "Traceback" not in report.error
    Path(str(job.images), "3.png").touch()
    worker_module._worker.cache_clear()
    do_task(str(job.path), 9, 0, 0)
    assert "Traceback" in told(job, Task(9, 0, 0)).error


def test_a_machine_that_does_not_see_the_run_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not see .*job\.json"):
        serve(str(tmp_path / "job.json"), 0)
    assert not list(tmp_path.iterdir())


def test_a_worker_that_still_imports_ends_with_its_command(tmp_path: Path) -> None:
    """Nobody holds its standard input; its first heavy import never ends."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    program = [sys.executable, "-m", "mjp_privacy.experiment.engines.process", "job.json", "0"]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    ended = subprocess.run(
        program, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}, timeout=50
    )
    assert ended.returncode == 0
