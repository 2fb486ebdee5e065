"""metrics.jsonl: a run's measurements line by line, each with a checksum of its own
(`core/checked_lines`), and the progress shown on the screen."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mjp_privacy.core.checked_lines import JSON_LINES
from mjp_privacy.core.gate.file_kind import FileKind, is_there

METRICS = "metrics.jsonl"
LINES = FileKind(
    "a line of JSON for each measurement of a training",
    "Delete this file; what it lists is measured no more.",
    1 << 30,
)
VALIDATED = {"val_top1": "val top-1", "val_miou": "val mIoU"}
"""What a validation measures, as the screen and the curves call it."""
PLAIN_INTERVAL = 20.0  # seconds between two lines on the screen


class Journal:
    """Writes metrics.jsonl and shows progress.

    What depends on the clock stands under `timing` in each line; all else is reproducible.
    """

    def __init__(self, folder: Path, steps: int, *, quiet: bool = False) -> None:
        self.path, self.steps, self.quiet = folder / METRICS, steps, quiet
        self.last_shown = time.monotonic()

    def keep_until(self, step: int) -> None:
        """Drop the lines after `step`; a continued run writes them again."""
        lines, damaged = whole_lines(self.path)
        if damaged:
            self.say(f"{METRICS}: {damaged} damaged line(s) are left out")
        kept = [line for line in lines if line["step"] <= step]
        JSON_LINES.rewrite(self.path, "", map(json.dumps, kept))

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to the file."""
        JSON_LINES.append(self.path, [json.dumps(line)])

    def show(self, line: dict[str, Any]) -> None:
        """Show loss, accuracy, speed and time left, every PLAIN_INTERVAL seconds and at the end."""
        done = line["step"] == self.steps
        if self.quiet or not (done or time.monotonic() - self.last_shown > PLAIN_INTERVAL):
            return
        self.last_shown = time.monotonic()
        timing = line["timing"]
        left = (self.steps - line["step"]) * timing["seconds_per_step"]
        minutes, seconds = divmod(round(left), 60)
        names = [name for name in VALIDATED if name in line]
        held_out = "".join(f" · {VALIDATED[name]} {line[name]:.1f} %" for name in names)
        self.say(
            f"epoch {line['epoch']:.2f} · step {line['step']}/{self.steps} · "
            f"loss {line['loss']:.3f} · train acc. {100 * line['accuracy']:.1f} %{held_out} · "
            f"{timing['images_per_s']:.0f} images/s · {100 * timing['waiting']:.0f} % waiting · "
            f"{minutes} min {seconds:02d} s left"
        )

    def say(self, message: str) -> None:
        """Print a message, unless this process is a quiet one."""
        if not self.quiet:
            print(message, file=sys.stderr, flush=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics.jsonl that say of which step they are."""
    return whole_lines(path)[0]


def whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The same, and how many other lines there are but for a last one that is unfinished: damaged
    ones, which their checksums tell, and those of something else."""
    if not is_there(path):
        return [], 0
    stored = JSON_LINES.read(LINES.bytes(path), needed=False)
    lines = [line for text in stored.texts if (line := _line(text)) is not None]
    return lines, sum(bool(text.strip()) for text in stored.texts) - len(lines) + stored.damaged


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(line, dict) and type(line.get("step")) is int and line["step"] >= 0
    return line if fits else None
