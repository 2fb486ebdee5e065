"""Progress: speed and time left, as plain lines and as a log."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from mjp_privacy.core import progress
from mjp_privacy.core.progress import RunProgress


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
    run = RunProgress(total + 1000)
    assert run.speed() == ""
    run.skip(1000)
    clock[0] += 10
    run.advance(10, "model a float32")
    assert run.speed() == said


def test_a_line_comes_every_ten_seconds_and_at_the_end(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with RunProgress(100) as run:
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
    with RunProgress(30) as run:
        run.skip(30)
    assert capsys.readouterr().err == "all 30 units are finished already; nothing to do\n"


def test_what_is_said_is_logged_with_its_facts(tmp_path: Path) -> None:
    with RunProgress(1, tmp_path / "log.jsonl") as run:
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
    with RunProgress(100) as run:
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
