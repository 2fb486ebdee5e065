"""metrics.jsonl: a run's measurements line by line, each with a checksum of its own
(`core/files`), and the progress shown on the screen."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mjp_privacy.core.files import append_json_line, json_line, write_atomically
from mjp_privacy.core.read import FileKind, json_lines

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
        text = "".join(map(json_line, kept))
        write_atomically(self.path, lambda file: file.write_text(text, "utf-8"), durable=True)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to the file."""
        append_json_line(self.path, line)

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
    objects, damaged = json_lines(path, LINES)
    lines = [line for line in objects if _is_of_a_step(line)]
    return lines, len(objects) - len(lines) + len(damaged)


def _is_of_a_step(line: dict[str, Any]) -> bool:
    return type(line.get("step")) is int and line["step"] >= 0
