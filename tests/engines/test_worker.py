"""A worker does the tasks that its file names, keeps what it has in memory, and tells all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_json
from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.engines import worker as worker_module
from mjp_privacy.experiment.engines.worker import NEWS, Job, Task, do_task, serve, write_typed
from mjp_privacy.experiment.work import News
from tests.helpers.runs import names, photographs, tiny

CONFIG = tiny(attacks=[{"name": "grey"}], dtypes=["float32", "float64"])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
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
    worker_module._worker.cache_clear()


def done(job: Job, *place: int) -> News:
    """What a worker tells of a task that it was given."""
    task = Task(*place)
    do_task(str(job.path), task)
    return read_json(job.path.parent / task.file_name, NEWS, News)


def test_what_is_done_of_a_task_is_told_and_found_by_who_tries_it_again(job: Job) -> None:
    for attempt, found in (1, (3, 0)), (2, (0, 3)):
        told = done(job, 0, 0, 1, attempt)
        assert (told.error, told.units, told.finished) == ("", *found)


def test_an_error_is_told_in_the_tasks_file(job: Job) -> None:
    """A mistake in one line, a fault with its place."""
    Path(str(job.images), "3.png").unlink()
    told = done(job, 0, 0, 0)
    assert "3.png" in told.error
    assert "\n" not in told.error
    Path(str(job.images), "3.png").touch()
    worker_module._worker.cache_clear()
    assert "Traceback" in done(job, 9, 0, 0).error


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
