"""The files of a training's folder: its journal and curves, a checkpoint to continue from, and the
finished model for others."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, ConfigDict, Field, JsonValue
from pydantic.dataclasses import dataclass
from torch import Tensor

from mjp_privacy.core.drawing import colour, drawn, picture
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import append_json_line, json_line, write_atomically
from mjp_privacy.core.read import FileKind, is_there, json_lines, json_value, typed
from mjp_privacy.core.schema import Whole
from mjp_privacy.core.text import shown
from mjp_privacy.models.checkpoint_files import file_sha256, located, read_metadata
from mjp_privacy.models.loading import SIZES, weights_of
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.models.tensor_files import check_finite, read_torch_file, save_tensors
from mjp_privacy.training.config import Initial, TrainingConfig, other_sizes, plain

# the journal --------------------------------------------------------------------------------------

METRICS, CURVES = "metrics.jsonl", "curves.png"
LINES = FileKind(
    "a line of JSON for each measurement of a training",
    "Give the folder of a training, or train again in a new one.",
    1 << 30,
)
VALIDATED = {"val_top1": "top-1", "val_miou": "mIoU"}
"""What a validation measures, as the screen and the curves call it."""
PLAIN_INTERVAL = 20.0  # seconds between two lines on the screen


class Journal:
    """Writes metrics.jsonl and shows progress; a quiet one does neither. What depends on the clock
    stands under `timing` in each line."""

    mark = ""
    """What messages begin with."""

    def __init__(self, folder: Path, steps: int, *, quiet: bool = False) -> None:
        self.path, self.steps, self.quiet = folder / METRICS, steps, quiet
        self.last_shown = time.monotonic()
        self.last: dict[str, Any] | None = None  # line that was written

    def keep_until(self, step: int, last: dict[str, Any] | None) -> None:
        """Drop the lines after `step`; a continued run writes them again.

        last  the last one up to there, as the checkpoint knows it: written again if it was lost
        """
        if self.quiet:
            return
        lines, damaged = whole_lines(self.path)
        if damaged:
            self.say(f"{METRICS}: {damaged} damaged line(s) are left out")
        lines = [line for line in lines if line["step"] <= step]
        if last is not None and all(line["step"] != last["step"] for line in lines):
            self.say(f"{METRICS}: the line of step {last['step']} was lost and is written again")
            lines.append(last)
        self.last = last or (lines[-1] if lines else None)
        text = "".join(map(json_line, lines))
        write_atomically(self.path, lambda file: file.write_text(text, "utf-8"), durable=True)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to the file; of a training's, loss, accuracy, speed and time left are shown
        every PLAIN_INTERVAL seconds, and at the end."""
        if self.quiet:
            return
        append_json_line(self.path, line)
        self.last = line
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
            f"{timing['images_per_s']:.0f} images/s · "
            f"{minutes} min {seconds:02d} s left"
        )

    def say(self, message: str) -> None:
        if not self.quiet:
            print(self.mark + message, file=sys.stderr, flush=True)


def of_a_step(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl that says of which step it is; ValueError for any other."""
    if type(line.get("step")) is not int or line["step"] < 0:
        raise ValueError("expected a line with its step")
    return line


def whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All complete lines of a metrics.jsonl that say of which step they are, and how many others
    there are but for a last one that is unfinished: damaged ones, which their checksums tell, and
    those of something else."""
    objects, damaged = json_lines(path, LINES)
    lines = list[dict[str, Any]]()
    for line in objects:
        with suppress(ValueError):
            lines.append(of_a_step(line))
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


def points_of(run: Path) -> tuple[list[Point], int]:
    """The points of a training run, none where it only just began, and how many lines are damaged,
    the last one of a finished training among them if it is not there; UserError where none of the
    lines is a training's."""
    path = run / METRICS
    if not is_there(path):
        raise UserError(f"No {METRICS} in {shown(run)}: expected the folder of a training run.")
    lines, damaged = whole_lines(path)
    points = []
    for line in lines:
        with suppress(UserError):
            points.append(typed(line, path, LINES, Point))
    if not points and (lines or damaged):
        raise LINES.refusal(path, f"{len(lines) + damaged} lines of something else")
    steps = ""
    with suppress(UserError):  # a damaged model says nothing of its training
        steps = read_metadata(run / MODEL).get("steps", "")
    if steps and all(str(line["step"]) != steps for line in lines):
        damaged = max(damaged, 1)  # a last line without its end is no line
    return points, damaged


def draw_curves(runs: Sequence[Path], out: Path) -> int:
    """Write curves.png into `out`: training loss on the left, validation on the right: top-1 or, of
    a segmentation, mIoU. Runs are called as their folders are. The number of damaged lines, which
    are named."""
    found = {run: points_of(run) for run in runs}
    if not any(points for points, _ in found.values()):
        raise UserError(
            f"Expected the folders of training runs, one with a line in {METRICS}; got "
            f"{', '.join(map(shown, runs)) or 'none'}. Give it the time of an epoch."
        )
    measures: set[str] = set()
    with picture(out / CURVES, 9, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        for number, (run, (points, damaged)) in enumerate(found.items()):
            if damaged:
                what = f"{shown(run / METRICS)}: {damaged} damaged line(s) are left out"
                do = "the same `mjp train` writes a last one again"
                print(f"{what} of the curves; {do}", file=sys.stderr, flush=True)
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
    return sum(damaged for _, damaged in found.values())


CHECKPOINT, MODEL = "checkpoint.pt", "model.safetensors"

# whose folder it is -------------------------------------------------------------------------------

FEDERATION = "federation.json"
MARKS = {
    FEDERATION: ("federate", "the folder of a federation", "mjp compare"),
    "uploads": ("federate", "the folder of a federation", "mjp compare"),
    "experiment.yaml": ("attack", "the run of an attack", "mjp report"),
    METRICS: ("train", "the folder of a training", "mjp curves"),
}
"""By a file in it, the command whose --out a folder is, what it is, and which command shows it; of
several such files the first counts."""


def check_command(folder: Path, command: str) -> None:
    """Raise where a folder is the --out of another command of MARKS than this one."""
    for name, (by, what, shows) in MARKS.items():
        if not is_there(folder / name):
            continue
        if by == command:
            return
        expected = next(own for of, own, _ in MARKS.values() if of == command)
        raise UserError(
            f"{shown(folder)} is {what}, which `{shows}` shows: expected {expected}. Give another "
            "folder."
        )


# a checkpoint -------------------------------------------------------------------------------------

IDENTITY = {
    "images": "training images or labels (--data)",
    "validation": "validation images or labels (--val)",
    "initial": "weights to start from (--initial)",
}
"""The parts of a run's identity besides its config, as error messages call them."""
STATE = FileKind(
    f"the {CHECKPOINT} of an earlier run of this command, complete and as it was written",
    "Give another --out, or remove that file to start anew.",
    1 << 40,
)
Words = Annotated[str, Field(strict=True, max_length=1 << 20)]
Measured = Annotated[dict[str, JsonValue], AfterValidator(of_a_step)]
LENIENT = ConfigDict(extra="ignore", allow_inf_nan=False, arbitrary_types_allowed=True)


@dataclass(frozen=True, config=LENIENT, kw_only=True)
class Checkpoint:
    """What every checkpoint holds, of a training or a federation.

    measured  the last line of metrics.jsonl, from which it is written again if it is lost
    """

    config: Words
    images: Words
    validation: Words
    initial: Words
    step: Whole
    model: dict[str, Tensor]
    measured: Measured | None = None


@dataclass(frozen=True, config=LENIENT, kw_only=True)
class TrainingCheckpoint(Checkpoint):
    """How far a training had come, and with what."""

    optimizer: dict[str, Any]
    average: dict[str, Tensor] | None
    made_with: list[dict[str, Any]]
    val_top1: Percent | None = None
    val_miou: Percent | None = None


Kind = TypeVar("Kind", bound=Checkpoint)


def identity_of(
    config: Mapping[str, Any], examples: Any, held_out: Any | None, initial: Initial | None
) -> dict[str, str]:
    """What decides a run's numbers; a checkpoint is continued only if all of it is the same."""
    start = located(initial.checkpoint) if initial else None
    return {
        "config": json.dumps(config),
        "images": examples.digest(),
        "validation": held_out.digest() if held_out else "none",
        "initial": file_sha256(start) if start and start.is_file() else "none",
    }


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write checkpoint.pt; the previous one stays until the new one is complete."""
    write_atomically(folder / CHECKPOINT, lambda path: torch.save(state, path), durable=True)


def load_checkpoint(
    folder: Path, identity: Mapping[str, str], kind: type[Kind], steps: int
) -> Kind | None:
    """The state of the run of so many steps in this folder, or None if there is none. A run of
    another config or other images is an error."""
    path = folder / CHECKPOINT
    if not is_there(path):
        return None
    stored = typed(read_torch_file(path, STATE, own=True), path, STATE, kind)
    check_config(json_value(stored.config, path, STATE), json.loads(identity["config"]))
    for key, what in IDENTITY.items():
        if getattr(stored, key) != identity[key]:
            raise UserError(
                f"--out holds a run with other {what} than this command: expected those that it "
                "began with. Give the same, or another --out."
            )
    if stored.step > steps:
        raise STATE.refusal(path, f"step {stored.step} of {steps} steps", "step")
    return stored


def check_config(before: Any, now: Any) -> None:
    """Raise unless the run in --out has this config; the first field that differs is named."""
    place = ""
    while before != now:
        if not (isinstance(before, dict) and isinstance(now, dict)):
            raise UserError(
                f"--out holds a run of another config: {place} was {before!r} and is {now!r}. "
                "Expected the same config; give another --out."
            )
        name = next(n for n in sorted({*before, *now}) if before.get(n) != now.get(n))
        before, now, place = before.get(name), now.get(name), f"{place}.{name}".strip(".")


def check_weights(stored: Any, like: Mapping[str, Tensor], path: Path, field: str) -> None:
    """Raise unless these are finite tensors of the same names, shapes and types."""
    with STATE.reading(path):
        if stored.keys() != like.keys():
            other = ", ".join(sorted(map(str, stored.keys() ^ like.keys())))
            raise STATE.refusal(path, f"tensors of another model ({shown(other, 60)})", field)
        for name, tensor in like.items():
            found = stored[name]
            if getattr(found, "shape", None) != tensor.shape or found.dtype != tensor.dtype:
                got = f"something else than {tuple(tensor.shape)} numbers of {tensor.dtype}"
                raise STATE.refusal(path, got, f"{field}, {name}")
        check_finite({f"{field}, {name}": stored[name] for name in like}, path, STATE)


# the finished model -------------------------------------------------------------------------------


def export_model(
    folder: Path, model: MJPVisionTransformer, config: TrainingConfig, facts: dict[str, Any]
) -> Path:
    """Write the weights as safetensors with their digest, in float32, and as JSON in the metadata
    these facts and all that `load_model` needs; the file's path."""
    shape, jigsaw = config.model, config.jigsaw
    gamma: float | None = jigsaw.gamma
    if jigsaw.shuffle != "patches":  # SPP shuffles all, and a checkpoint had its own ratio
        gamma = None if jigsaw.shuffle != "none" or config.initial else 0.0
    positions = "N(0, 1)" if config.positions_as_paper else "N(0, 0.02²)"
    memory = config.data.store == "memory"
    arch = f"vit d{shape.embed_dim} l{shape.depth} h{shape.num_heads} p{shape.patch_size}"
    sizes = other_sizes(config)
    classifies = config.task == "classification"
    other: dict[str, Any] = {} if classifies else {"task": config.task}
    if sizes is not None and classifies:
        other[SIZES] = asdict(sizes)
    if shape.dal == "pca" and classifies:  # the one kind that no tensor shows
        other["dal"] = shape.dal
    stated = {
        **other,
        "name": config.name,
        "arch": arch if sizes is None else str(sizes),
        "img_size": shape.img_size,
        "resize": shape.img_size if memory else None,
        "num_heads": shape.num_heads,
        "num_classes": shape.num_classes,
        "mean": shape.mean,
        "std": shape.std,
        "position_embedding": "exposed" if shape.position_embedding == "none" else "learned",
        "first_block": shape.first_block,
        "trained_gamma": gamma,
        "position_start": "initial" if config.initial else positions,
        "position_decay": config.positions_as_paper and classifies,
        "seed": config.seed,
        "recipe": plain(config),
        **facts,
    }
    metadata = {name: json.dumps(fact) for name, fact in stated.items()}
    kept = weights_of(model).items()
    tensors = {key: value.detach().to("cpu", torch.float32).contiguous() for key, value in kept}
    save_tensors(folder / MODEL, tensors, metadata, digest=True)
    return folder / MODEL
