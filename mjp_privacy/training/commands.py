"""`mjp train`, `mjp evaluate` and `mjp curves`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mjp_privacy.core.command import DONE, Usage, use_threads
from mjp_privacy.training.config import load_training
from mjp_privacy.training.evaluation_arguments import EvaluationArguments


@dataclass(frozen=True)
class TrainArguments:
    """Train a ViT, with or without MJP; the same command goes on where it stopped.

    Several GPUs or processes: torchrun --nproc_per_node=N -m mjp_privacy train ...
    """

    config: tyro.conf.Positional[Path]
    """A file of configs/training."""
    data: Path
    """Class folders, a zip of them, or ImageNet's layout with train and val inside."""
    out: Path
    """The run: checkpoint.pt, metrics.jsonl, curves.png, and at the end model.safetensors."""
    row: str | None = None
    """Which of the config's rows, where it has some (A to J of Table 4, ...)."""
    val: Path | None = None
    """Validation images; not needed with ImageNet's layout."""
    initial: Path | None = None
    """Fine-tune from this checkpoint, in place of the config's."""
    epochs: int | None = None
    batch: int | None = None
    lr: float | None = None
    seed: int | None = None
    precision: Literal["bfloat16", "float32"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int = 2
    """Processes that decode images, where they are not kept in memory."""
    threads: int | None = None
    """CPU threads; part of the numbers on a CPU."""
    deterministic: bool = False
    """Only deterministic kernels: slower, and the same numbers on the same GPU."""
    overlay: Path | None = None
    """Another run's folder, drawn beside this one in curves.png."""


@dataclass(frozen=True)
class CurveArguments:
    """Loss and accuracy of training runs, overlaid."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of training runs."""
    out: Path
    """Folder for curves.png."""


def train(argv: list[str], usage: Usage) -> int:
    given = usage.parse(TrainArguments, argv)
    changes = {"epochs": given.epochs, "batch": given.batch, "lr": given.lr, "seed": given.seed}
    config = load_training(
        given.config,
        given.row,
        initial=given.initial,
        precision=given.precision,
        **changes,
    )
    from mjp_privacy.training.run import train as train_model

    use_threads(given.threads)
    path = train_model(
        config,
        data=given.data,
        val=given.val,
        out=given.out,
        device=given.device,
        workers=given.workers,
        deterministic=given.deterministic,
        overlay=given.overlay,
    )
    print(path)
    return DONE


def evaluate(argv: list[str], usage: Usage) -> int:
    given = usage.parse(EvaluationArguments, argv)
    from mjp_privacy.training.evaluation import write_evaluation

    print(write_evaluation(given))
    if given.out:
        print(given.out)
    return DONE


def curves(argv: list[str], usage: Usage) -> int:
    given = usage.parse(CurveArguments, argv)
    from mjp_privacy.training.curves import check_runs, draw_curves

    check_runs(given.runs)
    print(draw_curves(given.runs, given.out))
    return DONE
