"""metrics.jsonl: a run's measurements line by line, each with a checksum of its own (`core/files`),
what the screen shows of them, and curves."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from mjp_privacy.core.drawing import colour, drawn, picture
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import append_json_line, json_line, write_atomically
from mjp_privacy.core.read import FileKind, is_there, json_lines
from mjp_privacy.core.text import shown


class Window:
    """Sums over the steps since the last line, kept on the device, and how the time was spent."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch, self.device = batch, device
        self.restart()

    def restart(self) -> None:
        self.total, self.steps = torch.zeros(5, device=self.device), 0
        self.started, self.waited = time.monotonic(), 0.0

    def timed(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same batches; the time spent waiting for them is measured."""
        while True:
            asked_at = time.monotonic()
            batch = next(batches, None)
            self.waited += time.monotonic() - asked_at
            if batch is None:
                return
            yield batch

    def add(self, numbers: Tensor) -> None:
        self.total += numbers
        self.steps += 1

    def mean(self) -> Tensor:
        return self.total / self.steps

    def timing(self) -> dict[str, float]:
        """Speed and share of waiting. Call it after `mean` was read: then the device is done."""
        elapsed = max(time.monotonic() - self.started, 1e-9)
        return {
            "images_per_s": round(self.steps * self.batch / elapsed, 1),
            "seconds_per_step": elapsed / self.steps,
            "waiting": round(self.waited / elapsed, 4),
        }


# the file -----------------------------------------------------------------------------------------

METRICS = "metrics.jsonl"
LINES = FileKind(
    "a line of JSON for each measurement of a training",
    "Delete this file; what it lists is measured no more.",
    1 << 30,
)
VALIDATED = {"val_top1": "top-1", "val_miou": "mIoU"}
"""What a validation measures, as the screen and the curves call it."""
PLAIN_INTERVAL = 20.0  # seconds between two lines on the screen


class Journal:
    """Writes metrics.jsonl and shows progress; a quiet one does neither.

    What depends on the clock stands under `timing` in each line; all else is reproducible.
    """

    mark = ""
    """What messages begin with."""

    def __init__(self, folder: Path, steps: int, *, quiet: bool = False) -> None:
        self.path, self.steps, self.quiet = folder / METRICS, steps, quiet
        self.last_shown = time.monotonic()

    def keep_until(self, step: int) -> None:
        """Drop the lines after `step`; a continued run writes them again."""
        if self.quiet:
            return
        lines, damaged = whole_lines(self.path)
        if damaged:
            self.say(f"{METRICS}: {damaged} damaged line(s) are left out")
        text = "".join(json_line(line) for line in lines if line["step"] <= step)
        write_atomically(self.path, lambda file: file.write_text(text, "utf-8"), durable=True)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to the file; of a training's, loss, accuracy, speed and time left are shown
        every PLAIN_INTERVAL seconds, and at the end."""
        if self.quiet:
            return
        append_json_line(self.path, line)
        due = time.monotonic() - self.last_shown > PLAIN_INTERVAL or line["step"] == self.steps
        if not due or "loss" not in line:
            return
        self.last_shown, timing = time.monotonic(), line["timing"]
        left = (self.steps - line["step"]) * timing["seconds_per_step"]
        minutes, seconds = divmod(round(left), 60)
        held_out = "".join(
            f" · val {VALIDATED[name]} {line[name]:.1f} %" for name in VALIDATED & line.keys()
        )
        self.say(
            f"epoch {line['epoch']:.2f} · step {line['step']}/{self.steps} · "
            f"loss {line['loss']:.3f} · train acc. {100 * line['accuracy']:.1f} %{held_out} · "
            f"{timing['images_per_s']:.0f} images/s · {100 * timing['waiting']:.0f} % waiting · "
            f"{minutes} min {seconds:02d} s left"
        )

    def say(self, message: str) -> None:
        if not self.quiet:
            print(self.mark + message, file=sys.stderr, flush=True)


def whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All complete lines of a metrics.jsonl that say of which step they are, and how many others
    there are but for a last one that is unfinished: damaged ones, which their checksums tell, and
    those of something else."""
    objects, damaged = json_lines(path, LINES)
    lines = [line for line in objects if type(line.get("step")) is int and line["step"] >= 0]
    return lines, len(objects) - len(lines) + len(damaged)


# curves, as in Fig. 6 of the paper ----------------------------------------------------------------

Finite = Annotated[float, Field(strict=True, ge=-1e12, le=1e12)]
Percent = Annotated[float, Field(strict=True, ge=0, le=100)]


@dataclass(frozen=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class Point:
    """What a line of metrics.jsonl adds to the curves."""

    epoch: Annotated[float, Field(strict=True, ge=0, le=1e12)]
    cross_entropy: Finite
    val_top1: Percent | None = None
    val_miou: Percent | None = None


_POINT = TypeAdapter(Point)


def points_of(run: Path) -> tuple[list[Point], int]:
    """The points of a training run, without lines that are damaged, and how many of those there
    are; no point of a run that only just began.

    UserError where the folder has no journal, or one with lines of which none is a training's.
    """
    path = run / METRICS
    if not is_there(path):
        raise UserError(f"No {METRICS} in {shown(run)}: expected the folder of a training run.")
    lines, damaged = whole_lines(path)
    points = []
    for line in lines:
        with suppress(ValidationError):
            points.append(_POINT.validate_python(line))
    if not points and (lines or damaged):
        raise LINES.refusal(path, f"{len(lines) + damaged} lines of something else")
    return points, damaged


def draw_curves(runs: Sequence[Path], out: Path) -> Path:
    """Write curves.png into `out`: training loss on the left, validation on the right: top-1 or, of
    a segmentation, mIoU. Runs are called as their folders are."""
    found = {run: points_of(run) for run in runs}
    if not any(points for points, _ in found.values()):
        raise UserError(
            f"Expected the folders of training runs, one with a line in {METRICS}; got "
            f"{', '.join(map(shown, runs)) or 'none'}. Give it the time of an epoch."
        )
    measures: set[str] = set()
    with picture(out / "curves.png", 9, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        for number, (run, (points, damaged)) in enumerate(found.items()):
            if damaged:
                what = f"{shown(run / METRICS)}: {damaged} damaged line(s) are left out"
                print(f"{what} of the curves", file=sys.stderr, flush=True)
            if not points:
                continue  # a run that has only just begun
            look = {"color": colour(number), "linewidth": 1}
            losses = [(point.epoch, point.cross_entropy) for point in points]
            left.plot(*zip(*losses, strict=True), label=drawn(run.resolve().name), **look)
            for measure, name in VALIDATED.items():
                scores = [(point.epoch, getattr(point, measure)) for point in points]
                scores = [score for score in scores if score[1] is not None]
                if scores:
                    measures.add(name)
                    right.plot(*zip(*scores, strict=True), marker="o", markersize=3, **look)
        left.set_title("training cross-entropy")
        right.set_title(f"validation {' and '.join(sorted(measures)) or 'top-1'} (%)")
        for axes in (left, right):
            axes.set_xlabel("epoch")
        left.legend()
    return out / "curves.png"
