"""Progress: speed and time left, as plain lines, as a bar, and messages as a log."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from mjp_privacy.core import progress
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import FileKind, read_json_lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    return drawn


@pytest.mark.parametrize(
    ("total", "left"), [(12, "0 min 02 s"), (69, "0 min 59 s"), (7210, "120 min 00 s")]
)
def test_speed_is_of_fresh_units_and_time_of_those_left(
    clock: list[float], total: int, left: str
) -> None:
    run = Progress("attack", total + 1000, "images")
    run.skip(1000)
    clock[0] += 10
    run.advance(10)
    assert run.figures() == f"1010/{total + 1000} · 1.0 images/s · {left} left"


def test_a_line_comes_every_ten_seconds_and_at_a_runs_end(
    clock: list[float], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with Progress("attack", 100, "images", tmp_path / "log.jsonl") as run:
        for _ in range(10):
            clock[0] += 3
            run.advance(5, "work")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" · ")[0] for line in lines] == [
        "work: 20/100",
        "work: 40/100",
        "work: 50/100",
    ]


def test_what_is_said_is_logged_with_its_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("attack", 1, "images", tmp_path / "log.jsonl") as run:
        run.say("loaded [brackets]", missing=["unk_embed"])
    assert capsys.readouterr().err == "loaded [brackets]\n"
    (entry,) = read_json_lines(tmp_path / "log.jsonl", FileKind("a log", "Delete it."))
    assert (entry["message"], entry["missing"]) == ("loaded [brackets]", ["unk_embed"])


def test_a_terminal_gets_a_bar_after_a_second(clock: list[float], terminal: io.StringIO) -> None:
    with Progress("reading", lambda: 5) as run:
        clock[0] += 0.9
        run.advance()
        assert run.bar is None
        clock[0] += 0.2
        run.advance()
        run.say("a line [with brackets]")
        for _ in range(4):  # cells with damage are read twice
            run.advance(what="ViT")
        assert run.bar is not None
        assert run.bar.tasks[0].completed == 6
        assert run.figures().startswith("6/6 · 5.5 files/s")
    assert "a line [with brackets]" in terminal.getvalue()
    assert "ViT" in terminal.getvalue()
