"""The options of `mjp evaluate`; in a file of their own so that `--help` imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mjp_privacy.core.schema import Seed, Share, schema


@schema
class EvaluationArguments:
    """Accuracy of models, and how often they give the same answer when their input is shuffled."""

    checkpoint: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files, each PATH or LABEL=PATH; or names: timm:NAME, or a model that comes with this
    package."""
    data: Path | None = None
    """Images with labels: class folders, ImageNet val, or a zip. Beside --imagenet-c their error
    stands too; --imagenet-o needs them as the images that are not strange."""
    imagenet_c: Path | None = None
    """Robustness (the paper's Tables 2, 10) in place of consistency: a folder in ImageNet-C's
    layout, corruption/severity/class. `mjp sample --corrupt` makes one of any images."""
    imagenet_a: Path | None = None
    """ImageNet-A: 200 folders of synsets, to which answers are restricted."""
    imagenet_o: Path | None = None
    """ImageNet-O: the same, of things that belong to none of the 1000 classes."""
    ade20k: Path | None = None
    """Segmentation (Table 9): pictures and label maps in ADE20K's layout, for checkpoints that were
    trained with task segmentation."""
    preset: Literal["ours", "paper", "authors_code"] = "ours"
    """Whose way of measuring. `authors_code`: accuracy on crops of 256/224, shuffled at γ = .9 with
    one mask for 128 images; consistency on squashed images at γ = .5; ImageNet's mean and std for
    every model. `paper` says nothing of these and measures as `ours`. ImageNet-C, -A and -O have
    their official crop under each; `authors_code` still has ImageNet's mean and std."""
    gamma: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    """Shares of shuffled patches in place of the preset's (ours: .27); several make a sweep
    (Fig. 3)."""
    out: Path | None = None
    """Folder for per_image.csv, summary.csv, table.md and sweep.png; of robustness for
    robustness.csv, robustness.md and, of ImageNet-C, per_image.csv; of segmentation for
    per_picture.csv, segmentation.csv and segmentation.md."""
    labels: Path | None = None
    """Label file of --data, such as a CSV with the header file,label."""
    model: str | None = None
    """The architecture's name, for files that do not state it (vit_tiny_patch16_224). This, --mean
    and --std are about those files alone where some state it and some do not."""
    img_size: str | None = None
    mean: tuple[float, ...] | None = None
    """Per-channel mean, one number or three, for files that do not state it."""
    std: tuple[float, ...] | None = None
    """Per-channel deviation, likewise."""
    position_embedding: Literal["learned", "exposed", "strict"] | None = None
    unknown_embedding: bool | None = None
    """False: shuffled patches keep their position embeddings, even in a model with E_unk."""
    paper_row: Annotated[str, Field(pattern="^[A-J]$")] | None = None
    """A row of Table 4 (A to J) to compare with, if the checkpoint does not show which."""
    limit: int | None = None
    """At most so many images, spread over the classes; of ImageNet-C in each of its cells."""
    seed: Seed = 0
    """Of the shuffles, and of the choice that --limit makes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    json: bool = False
    """Print a line for each model as JSON for programs (docs/json.md)."""
