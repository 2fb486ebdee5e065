"""The options of `mjp sample` and `mjp analyse`; in a file of their own so that `--help` imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class SampleArguments:
    """Copy a few images of every class, with their labels and hashes.

    With --corrupt they are written under the 15 corruptions of ImageNet-C at five severities, in
    its layout, for `mjp evaluate --imagenet-c`. With --shapes nothing is copied: pictures of shapes
    are drawn, with label maps in ADE20K's layout. With --cifar10 CIFAR-10's official files become
    the two zips that the trainings' commands name.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """New or empty folder for the sample."""
    source: Annotated[str | None, tyro.conf.arg(name="from", metavar="DIR_OR_ZIP")] = None
    """Folder or zip with labelled images."""
    shapes: int | None = None
    """Draw so many training pictures, and a quarter as many for validation, in place of --from: six
    classes, for trying out `mjp train` with task segmentation."""
    cifar10: Annotated[Path | None, tyro.conf.arg(metavar="TAR_GZ")] = None
    """cifar-10-binary.tar.gz, or the folder that it unpacks to, in place of --from: writes
    cifar10-train.zip and cifar10-test.zip, class folders of PNG files, into --out."""
    per_class: int = 1
    """Images of each class."""
    seed: int = 0
    """Seed of the choice."""
    labels: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Label file, such as a CSV with the header file,label."""
    limit: int | None = None
    """At most so many images of all classes together; the classes take turns."""
    corrupt: bool = False
    """Write corruption/severity/class/name.JPEG in place of copies. Our own code, not the official
    files: corrupted.json in the folder says what differs."""
    size: int = 224
    """Side of the corrupted images in pixels."""


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
