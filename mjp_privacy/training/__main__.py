"""python -m mjp_privacy.training CONFIG --data PATH --out DIR, alone or under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mjp_privacy.core.command import kindly
from mjp_privacy.core.errors import UserError
from mjp_privacy.training.config import load_training


@dataclass(frozen=True)
class TrainArguments:
    """Train a ViT, with or without MJP; the same command goes on where it stopped.

    Several GPUs or processes: torchrun --nproc_per_node=N -m mjp_privacy.training ...
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


def main(argv: Sequence[str] | None = None) -> int:
    return kindly(_train, list(sys.argv[1:] if argv is None else argv))


def _train(argv: list[str]) -> int:
    given = tyro.cli(TrainArguments, args=argv, prog="mjp_privacy.training")
    changes = {"epochs": given.epochs, "batch": given.batch, "lr": given.lr, "seed": given.seed}
    config = load_training(
        given.config,
        given.row,
        initial=given.initial,
        precision=given.precision,
        **changes,
    )
    import torch

    from mjp_privacy.training.run import train

    if given.threads is not None and given.threads < 1:
        raise UserError(f"--threads: expected 1 or more, got {given.threads}.")
    if given.threads:
        torch.set_num_threads(given.threads)
    path = train(
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
