"""`mjp sample`, `mjp train`, `mjp curves`, `mjp evaluate` and `mjp analyse`, and their options.

Their work is imported when it begins, so that `--help` needs no torch.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field

from mjp_privacy.core.command import (
    DONE,
    SOME_FAILED,
    Usage,
    check_idle,
    print_json,
    report_failed,
)
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_each_once, check_own, output_folder
from mjp_privacy.core.machine import use_threads
from mjp_privacy.core.registry import Entry
from mjp_privacy.core.schema import Count, Seed, Share, schema
from mjp_privacy.core.text import shown
from mjp_privacy.data.images import check_place, open_images
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
    """The run folder: checkpoint.pt, metrics.jsonl, at the end curves.png and model.safetensors."""
    row: str | None = None
    """Which of the config's rows to train, if it has rows (A to J of Table 4, ...)."""
    val: Path | None = None
    """Validation images; not needed if --data is in ImageNet's layout."""
    preset: Literal["ours", "paper", "authors_code"] | None = None
    """Whose choices to follow where the paper, its authors' code and this project differ
    (docs/paper.md); fields that the row sets stay."""
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
    """Folder that curves.png is written to, new or empty, or with another curves.png alone."""


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
    """New or empty folder for per_image.csv, summary.csv, table.md and sweep.png; of robustness for
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
    limit: int | None = None
    """At most so many images, spread over the classes; of ImageNet-C in each of its cells."""
    seed: Seed = 0
    """Of the shuffles, and of the choice that --limit makes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    json: bool = False
    """Print a line for each model as JSON for programs (docs/json.md)."""


@schema
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
    shapes: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Draw so many training pictures, and a quarter as many for validation, in place of --from: six
    classes, for trying out `mjp train` with task segmentation."""
    cifar10: Annotated[Path | None, tyro.conf.arg(metavar="TAR_GZ")] = None
    """cifar-10-binary.tar.gz in place of --from: cifar10-train.zip and cifar10-test.zip, of class
    folders of PNG files, are written into --out."""
    per_class: Count = 1
    """Images of each class."""
    seed: Seed = 0
    """Seed of the choice."""
    labels: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Label file, such as a CSV with the header file,label."""
    limit: int | None = None
    """At most so many images of all classes together; the classes take turns."""
    corrupt: bool = False
    """Write corruption/severity/class/name.JPEG in place of copies. Our own code, not the official
    files: corrupted.json in the folder says what differs."""
    size: Annotated[int, Field(ge=32, le=1024)] = 224
    """Side of the corrupted images in pixels."""


@schema
class AnalysisArguments:
    """What the position embeddings of models hold, and what MJP changes: variance in few
    dimensions, how well a linear map reads a patch's place, where the last block looks."""

    checkpoints: Annotated[tyro.conf.Positional[tuple[str, ...]], Field(min_length=1)]
    """Files, each PATH or LABEL=PATH; or names: timm:NAME, or a model that comes with this
    package. The pictures have their order: name the plain one first."""
    out: Path
    """New or empty folder for analysis.md, .csv, analysis.png and an attention picture a model."""
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
    seed: Seed = 0
    """Of the folds of the regression and of the choice of images."""
    threads: int | None = None
    """CPU threads."""


def train(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(TrainArguments, argv)
    changed = ("preset", "initial", "epochs", "batch", "lr", "seed", "precision")
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
    from mjp_privacy.training.run_files import CURVES, check_command, draw_curves

    for run in arguments.runs:
        check_command(run, "train")
    check_each_once(arguments.runs, "folders of training runs")
    check_own(arguments.out, "mjp curves", [CURVES])
    damaged = draw_curves(arguments.runs, output_folder(arguments.out))
    print(arguments.out / CURVES)
    return SOME_FAILED if damaged else DONE


def sample(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(SampleArguments, argv)
    out, source, seed = arguments.out, arguments.source, arguments.seed
    if [source, arguments.shapes, arguments.cifar10].count(None) != 2:
        raise UserError("Expected one of --from DIR_OR_ZIP, --shapes NUMBER and --cifar10 TAR_GZ.")
    if source is None:
        of_pictures = ("corrupt", "per_class", "labels", "limit")
        check_idle(arguments, of_pictures, "it is of the pictures of --from, which is not given")
    if arguments.cifar10 is not None:
        check_idle(arguments, ["seed"], "all pictures of --cifar10 are taken")
    if not arguments.corrupt:
        check_idle(arguments, ["size"], "it is the side of the pictures that --corrupt makes")
    if source is None:
        if arguments.cifar10 is not None:
            print(Entry("mjp_privacy.paper.image_sets:make_cifar10").load()(arguments.cifar10, out))
        else:
            make_shapes = Entry("mjp_privacy.paper.image_sets:make_shapes").load()
            print(make_shapes(out, arguments.shapes, seed))
        return DONE
    images = open_images(source, arguments.labels)
    count = len(images.records)
    print(f"{count} images in {shown(source)}. {images.labels_described}", flush=True)
    choice: dict[str, Any] = {"per_class": arguments.per_class, "limit": arguments.limit}
    if arguments.corrupt:
        make = Entry("mjp_privacy.paper.image_sets:make_corrupted").load()
        choice["size"] = arguments.size
    else:
        from mjp_privacy.data.sample import make_sample as make
    done = make(images, out, seed=seed, **choice)
    print(done.text)
    return report_failed(done.failed, "not read; skipped.csv lists all")


def evaluate(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(EvaluationArguments, argv)
    check_place(arguments.data)
    place = "training.evaluation:write_evaluation"
    if arguments.ade20k:
        place = "paper.segmentation:write_segmentation"
    elif arguments.imagenet_c or arguments.imagenet_a or arguments.imagenet_o:
        place = "paper.robustness:write_robustness"
    outcome = Entry(f"mjp_privacy.{place}").load()(arguments)
    if arguments.json:
        print_json(
            "evaluate", {"lines": outcome.lines, "folder": arguments.out, "failed": outcome.failed}
        )
    else:
        print(outcome.text)
        if arguments.out:
            print(arguments.out)
    return report_failed(outcome.failed, "not read, and in no figure")


def analyse(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(AnalysisArguments, argv)
    use_threads(arguments.threads)
    outcome = Entry("mjp_privacy.paper.positions_report:write_analysis").load()(arguments)
    print(outcome.text)
    return report_failed(outcome.failed, "left out")
