"""The commands of this room, `mjp sample`, `mjp evaluate` and `mjp analyse`, and their options.

Their work is imported when it begins, so that `--help` needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import Field

from mjp_privacy.core.command import DONE, Usage, check_idle, print_json, report_failed
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import use_threads
from mjp_privacy.core.registry import Entry
from mjp_privacy.core.schema import Count, Seed, schema
from mjp_privacy.core.text import shown
from mjp_privacy.data.images import check_place, open_images
from mjp_privacy.training.commands import EvaluationArguments


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
        from mjp_privacy.paper.image_sets import make_cifar10, make_shapes

        if arguments.cifar10 is not None:
            print(make_cifar10(arguments.cifar10, out))
        else:
            assert arguments.shapes is not None
            print(make_shapes(out, arguments.shapes, seed))
        return DONE
    images = open_images(source, arguments.labels)
    count = len(images.records)
    print(f"{count} images in {shown(source)}. {images.labels_described}", flush=True)
    choice: dict[str, Any] = {"per_class": arguments.per_class, "limit": arguments.limit}
    choice["seed"] = seed
    if arguments.corrupt:
        from mjp_privacy.paper.image_sets import make_corrupted

        done = make_corrupted(images, out, size=arguments.size, **choice)
    else:
        from mjp_privacy.data.sample import make_sample

        done = make_sample(images, out, **choice)
    print(done.text)
    return report_failed(done.failed, "not read; skipped.csv lists all")


def evaluate(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(EvaluationArguments, argv)
    check_place(arguments.data)
    if arguments.ade20k:
        from mjp_privacy.paper.segmentation import write_segmentation as write
    elif arguments.imagenet_c or arguments.imagenet_a or arguments.imagenet_o:
        from mjp_privacy.paper.robustness import write_robustness as write
    else:
        from mjp_privacy.training.evaluation import write_evaluation as write
    outcome = write(arguments)
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
    # by its name, for it takes the options above
    write = Entry("mjp_privacy.paper.positions_report:write_analysis").load()
    outcome = write(arguments)
    print(outcome.text)
    return report_failed(outcome.failed, "left out")
