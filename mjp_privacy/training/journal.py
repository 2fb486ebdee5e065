"""metrics.jsonl: what a run measured, a line at a time, and what a person sees of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mjp_privacy.core.files import write_atomically

METRICS = "metrics.jsonl"
PLAIN_INTERVAL = 20.0  # seconds between two lines on the screen


class Journal:
    """Lines by step. What depends on the clock stands under `timing`; all else is reproducible."""

    def __init__(self, folder: Path, steps: int, *, quiet: bool = False) -> None:
        self.path, self.steps, self.quiet = folder / METRICS, steps, quiet
        self.said = time.monotonic()

    def keep_until(self, step: int) -> None:
        """Drop the lines after `step`: they will be made again."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(self.path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def show(self, line: dict[str, Any]) -> None:
        """Loss, accuracy, speed and time left; not too often."""
        done = line["step"] == self.steps
        if self.quiet or not (done or time.monotonic() - self.said > PLAIN_INTERVAL):
            return
        self.said = time.monotonic()
        timing = line["timing"]
        left = (self.steps - line["step"]) * timing["seconds_per_step"]
        minutes, seconds = divmod(round(left), 60)
        held_out = f" · val top-1 {line['val_top1']:.1f} %" if "val_top1" in line else ""
        self.say(
            f"epoch {line['epoch']:.2f} · step {line['step']}/{self.steps} · "
            f"loss {line['loss']:.3f} · train acc. {100 * line['accuracy']:.1f} %{held_out} · "
            f"{timing['images_per_s']:.0f} images/s · {100 * timing['waiting']:.0f} % waiting · "
            f"{minutes} min {seconds:02d} s left"
        )

    def say(self, message: str) -> None:
        if not self.quiet:
            print(message, file=sys.stderr, flush=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines; one that a crash cut off is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
