"""The options of `mjp evaluate`; in a file of their own so that `--help` imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class EvaluationArguments:
    """Accuracy of models, and how often they give the same answer when their input is shuffled."""

    checkpoint: tuple[str, ...]
    """Files, each PATH or LABEL=PATH; or names: timm:NAME, or a model that comes with this
    package."""
    data: Path
    """Images with labels: class folders, ImageNet val, or a zip."""
    gamma: tuple[float, ...] = (0.27,)
    """Shares of shuffled patches; several make a sweep (Fig. 3)."""
    out: Path | None = None
    """Folder for per_image.csv, summary.csv, table.md and sweep.png."""
    labels: Path | None = None
    model: str | None = None
    """The architecture's name, for files that do not state it (vit_tiny_patch16_224)."""
    img_size: int | None = None
    mean: tuple[float, ...] | None = None
    """Per-channel mean, one number or three, for files that do not state it."""
    std: tuple[float, ...] | None = None
    position_embedding: Literal["learned", "exposed", "strict"] | None = None
    unknown_embedding: bool | None = None
    """False: shuffled patches keep their position embeddings, even in a model with E_unk."""
    paper_row: str | None = None
    """A row of Table 4 (A to J) to compare with, if the checkpoint does not show which."""
    limit: int | None = None
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
