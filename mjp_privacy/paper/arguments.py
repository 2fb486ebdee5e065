"""The options of `mjp analyse`; in a file of their own so that `--help` imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class AnalysisArguments:
    """What the position embeddings of models hold, and what MJP changes: variance in few
    dimensions, how well a linear map reads a patch's place, where the last block looks."""

    checkpoints: tyro.conf.Positional[tuple[str, ...]]
    """Files, each PATH or LABEL=PATH; or names: timm:NAME, or a model that comes with this
    package. The pictures have their order: name the plain one first."""
    out: Path
    """Folder for analysis.md, .csv, .json, analysis.png and an attention picture a model."""
    images: Path = Path("embedded")
    """Images for the attention maps: a folder, a zip, or `embedded`, scikit-image's photographs."""
    limit: int = 20
    """Most images to use."""
    model: str | None = None
    """The architecture's name, for files that do not state it (vit_tiny_patch16_224). This, --mean
    and --std are about those files alone where some state it and some do not."""
    img_size: int | None = None
    """The input size of all models; position embeddings are resampled to it."""
    mean: tuple[float, ...] | None = None
    """Per-channel mean, one number or three, for files that do not state it."""
    std: tuple[float, ...] | None = None
    """Per-channel deviation, likewise."""
    umap: bool = False
    """Also lay the tables out in a plane by UMAP (Fig. 1 and 7) from two seeds: umap.png. Needs the
    package umap-learn, and about half a minute a table."""
    seed: int = 0
    """Of the folds of the regression and of the choice of images."""
    threads: int | None = None
    """CPU threads."""
