"""Progress: speed and time left, as plain lines and as a log."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from mjp_privacy.core import progress
from mjp_privacy.core.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("total", "said"),
    [
        (12, "1.0 images/s · 0 min 02 s left"),
        (69, "1.0 images/s · 0 min 59 s left"),
        (120, "1.0 images/s · 1 min 50 s left"),
        (129, "1.0 images/s · 1 min 59 s left"),
        (7210, "1.0 images/s · 120 min 00 s left"),
    ],
)
def test_speed_is_of_fresh_units_and_time_of_those_left(
    clock: list[float], total: int, said: str
) -> None:
    run = Progress(total + 1000)
    assert run.speed() == ""
    run.skip(1000)
    clock[0] += 10
    run.advance(10, "model a float32")
    assert run.speed() == said


def test_a_line_comes_every_ten_seconds_and_at_the_end(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(100) as run:
        for _ in range(10):
            clock[0] += 3
            run.advance(5, "work")
    lines = capsys.readouterr().err.splitlines()
    assert [re.match(r"\w+: \d+/100", line)[0] for line in lines] == [  # type: ignore[index]
        "work: 20/100",
        "work: 40/100",
        "attack: 50/100",
    ]


def test_a_finished_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(30) as run:
        run.skip(30)
    assert capsys.readouterr().err == "all 30 units are finished already; nothing to do\n"


def test_what_is_said_is_logged_with_its_facts(tmp_path: Path) -> None:
    with Progress(1, tmp_path / "log.jsonl") as run:
        run.say("loaded [brackets]", missing=["unk_embed"])
        run.advance(1, "x")
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["message"], entry["missing"]) == ("loaded [brackets]", ["unk_embed"])


def test_a_terminal_gets_a_bar_with_the_same_figures(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    with Progress(100) as run:
        run.skip(20)
        clock[0] += 10
        run.advance(10, "ViT a float32")
        run.say("a line [with brackets]")
        assert run.bar is not None
        assert run.bar.tasks[0].completed == 30
        assert run.bar.tasks[0].fields["say"] == "1.0 images/s · 1 min 10 s left"
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a line [with brackets]" in printed
    assert "ViT a float32" in printed


def test_what_goes_before_the_work_is_shown_once_it_takes_long(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("reading", lambda: 40) as bar:
        for _ in range(20):
            clock[0] += 0.9
            bar.advance()
    assert capsys.readouterr().err == "reading: 12/40 · 1.1 files/s · 0 min 25 s left\n"


def test_what_nobody_has_counted_is_shown_without_a_total(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress("files", None) as bar:
        clock[0] += 11
        bar.advance()
    assert capsys.readouterr().err == "files: 1\n"
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    with Progress("files", None) as bar:
        clock[0] += 11
        bar.advance()
        bar.advance()
        assert bar.bar is not None
        assert bar.bar.tasks[0].fields["say"] == "2"


def test_what_is_quick_is_never_counted_nor_shown(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    def total() -> int:
        raise AssertionError("nobody asked")

    with Progress("reading", total) as bar:
        for _ in range(90):
            clock[0] += 0.1
            bar.advance()
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_late_bar_after_a_second(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    with Progress("reading what is stored", lambda: 5) as bar:
        clock[0] += 0.9
        bar.advance()
        assert bar.bar is None
        clock[0] += 0.2
        bar.advance()
        assert bar.bar is not None
        for _ in range(4):  # cells with damage are read twice
            bar.advance()
        assert bar.bar.tasks[0].fields["say"] == "6/6 · 5.5 files/s · 0 min 00 s left"
    assert "reading what is stored" in console.file.getvalue()  # type: ignore[attr-defined]
