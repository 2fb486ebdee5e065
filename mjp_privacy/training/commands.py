"""The commands `mjp train` and `mjp curves`."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mjp_privacy.core.command import DONE, Usage
from mjp_privacy.core.files import output_folder
from mjp_privacy.core.machine import use_threads
from mjp_privacy.data.opening import check_place
from mjp_privacy.training.config import load_training


@dataclass(frozen=True)
class TrainArguments:
    """Train a ViT, with or without MJP. After an interruption the same command continues the run.

    Several GPUs or processes: torchrun --nproc_per_node=N -m mjp_privacy train ...
    """

    config: tyro.conf.Positional[Path]
    """A YAML file, such as one of configs/training."""
    data: Path
    """Class folders, a zip of them, or ImageNet's layout with train and val inside; with task
    segmentation a folder or zip in ADE20K's layout."""
    out: Path
    """The run folder: checkpoint.pt, metrics.jsonl, curves.png, at the end model.safetensors."""
    row: str | None = None
    """Which of the config's rows to train, if it has rows (A to J of Table 4, ...)."""
    val: Path | None = None
    """Validation images; not needed if --data is in ImageNet's layout."""
    preset: Literal["ours", "paper", "authors_code"] | None = None
    """Whose choices to follow where the paper, its authors' code and this project differ
    (docs/paper.md); fields that the row sets stay."""
    task: Literal["classification", "segmentation"] | None = None
    """What to train in place of the config's task."""
    initial: Path | None = None
    """Fine-tune from this checkpoint instead of the config's."""
    epochs: int | None = None
    """In place of the config's, as the next ones. For a trial: few epochs of a part of the images,
    which `mjp sample --per-class` makes."""
    batch: int | None = None
    """Images of a step, over all processes."""
    lr: float | None = None
    """The highest learning rate."""
    seed: int | None = None
    """Of weights, order, augmentation and masks."""
    precision: Literal["bfloat16", "float32"] | None = None
    """Of the products; weights are float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    workers: int = 2
    """Processes that decode images; not used if the config keeps images in memory."""
    threads: int | None = None
    """CPU threads; on a CPU their number changes the results slightly."""


@dataclass(frozen=True)
class CurveArguments:
    """Draw loss and accuracy of several training runs into one picture."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of training runs."""
    out: Path
    """Folder that curves.png is written to."""


def train(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(TrainArguments, argv)
    changed = ("preset", "task", "initial", "epochs", "batch", "lr", "seed", "precision")
    changes = {name: getattr(arguments, name) for name in changed}
    config = load_training(arguments.config, arguments.row, **changes)
    for place in (arguments.data, arguments.val):
        check_place(place)
    from mjp_privacy.training.trainer import train as train_model

    use_threads(arguments.threads)
    path = train_model(
        config,
        data=arguments.data,
        val=arguments.val,
        out=arguments.out,
        device=arguments.device,
        workers=arguments.workers,
    )
    if os.environ.get("RANK", "0") == "0":
        print(path)
        if config.task == "classification" and config.family == "vit":
            model, images = (shlex.quote(str(place)) for place in (path, arguments.data))
            print(f"Next: mjp attack own --weights {model} --images {images}", file=sys.stderr)
    return DONE


def curves(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(CurveArguments, argv)
    from mjp_privacy.training.journal import draw_curves

    print(draw_curves(arguments.runs, output_folder(arguments.out)))
    return DONE
