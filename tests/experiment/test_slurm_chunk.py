"""What a Slurm task does: block after block, until it is done, warned or not wanted any more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("submitit", reason="the extra `slurm` is not installed")

from mjp_privacy.experiment.engines import slurm_chunk
from mjp_privacy.experiment.engines.slurm_chunk import Chunk

TASKS = [(0, 3, 1), (0, 4, 1), (0, 5, 1)]
Do = Callable[..., None]


class Exited(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work" / "slurm" / "mjp-x"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def doing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Do], None]:
    """Sets what is done in place of a task."""

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)
    return lambda do: monkeypatch.setattr(slurm_chunk, "do_task", do)


def chunk(folder: Path, minutes: int = 60, idle: int = 0) -> Chunk:
    return Chunk("work/job.json", str(folder), TASKS, minutes, idle)


def test_blocks_are_done_one_after_the_other(folder: Path, doing: Callable[[Do], None]) -> None:
    done: list[tuple[object, ...]] = []
    doing(lambda *task: done.append(task))
    chunk(folder)()
    assert done == [("work/job.json", *task) for task in TASKS]


def test_nothing_is_done_for_a_command_that_is_over(
    folder: Path, doing: Callable[[Do], None]
) -> None:
    """The folder of the submission goes with the command, at its end or as the next one starts."""
    done: list[int] = []

    def do(job_file: str, model: int, block: int, attempt: int) -> None:
        done.append(block)
        folder.rmdir()

    doing(do)
    chunk(folder)()
    assert done == [3]


def warned(running: Chunk, doing: Callable[[Do], None], after: int) -> Chunk:
    """What goes on after the chunk was warned while it did its n-th task."""
    doing_it, over = threading.Event(), threading.Event()
    blocks: list[int] = []

    def do(job_file: str, model: int, block: int, attempt: int) -> None:
        blocks.append(block)
        if len(blocks) == after:
            doing_it.set()
            over.wait(10)

    doing(do)
    thread = threading.Thread(target=running)
    thread.start()
    assert doing_it.wait(10)
    try:
        left: Chunk = running.checkpoint().function
        return left
    finally:
        over.set()
        thread.join()


def test_what_is_not_done_goes_on_elsewhere(folder: Path, doing: Callable[[Do], None]) -> None:
    left = warned(chunk(folder), doing, after=2)
    assert (left.job_file, left.folder, left.tasks) == ("work/job.json", str(folder), TASKS[1:])
    assert left.idle == 0


@pytest.mark.parametrize(
    ("minutes", "after", "idle"),
    [
        pytest.param(60, 1, 1, id="preempted: as before"),
        pytest.param(3, 1, 2, id="late without a block: one more"),
        pytest.param(3, 2, 0, id="late with a block: none"),
    ],
)
def test_time_limits_in_a_row_without_a_block_are_counted(
    folder: Path, doing: Callable[[Do], None], minutes: int, after: int, idle: int
) -> None:
    assert warned(chunk(folder, minutes, idle=1), doing, after).idle == idle


def test_a_block_that_never_ends_in_time_is_given_up(
    folder: Path, doing: Callable[[Do], None]
) -> None:
    with pytest.raises(SystemExit) as raised:
        warned(chunk(folder, minutes=3, idle=2), doing, after=1)
    said = "no block was done within 3 minutes, 3 times in a row: give more (option minutes)"
    assert raised.value.code == said


def test_a_signal_ends_the_process_at_once_and_an_error_says_itself(
    folder: Path, doing: Callable[[Do], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    doing(fail)
    with pytest.raises(Exited) as raised:
        chunk(folder)()
    assert raised.value.args == (1,)
    assert capfd.readouterr().err == "OSError: no space left\n"
