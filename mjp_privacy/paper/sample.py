"""`mjp sample`: copies a few images of every class, or writes them corrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from mjp_privacy.core.command import DONE, Usage, report_failed
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown

Entry = TypeVar("Entry")


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


def sample(argv: list[str], usage: Usage) -> int:
    """Write the sample that `argv` describes and print what was chosen."""
    arguments = usage.parse(SampleArguments, argv)
    out, seed = arguments.out, arguments.seed
    drawn, packed = arguments.shapes is not None, arguments.cifar10 is not None
    if [arguments.source is not None, drawn, packed].count(True) != 1:
        raise UserError("Expected one of --from DIR_OR_ZIP, --shapes NUMBER and --cifar10 TAR_GZ.")
    if arguments.corrupt and arguments.source is None:
        raise UserError("--corrupt takes the pictures of --from: expected no --shapes, --cifar10.")
    if arguments.cifar10 is not None:
        from mjp_privacy.paper.cifar10 import make_cifar10

        print(make_cifar10(arguments.cifar10, out, partial(_shown, "writing", "pictures")))
        return DONE
    if arguments.shapes is not None:
        from mjp_privacy.paper.shapes import make_shapes

        print(make_shapes(out, arguments.shapes, seed))
        return DONE
    assert arguments.source is not None
    from mjp_privacy.data.opening import open_images

    images = open_images(arguments.source, arguments.labels)
    count = len(images.records)
    print(f"{count} images in {shown(arguments.source)}. {images.labels_described}", flush=True)
    chosen: dict[str, Any] = {"per_class": arguments.per_class, "limit": arguments.limit}
    chosen["seed"] = seed
    choosing = partial(_shown, "choosing", "classes")
    if arguments.corrupt:
        from mjp_privacy.paper.corrupted_folder import make_corrupted

        chosen |= {"size": arguments.size, "choosing": choosing}
        chosen["corrupting"] = partial(_shown, "corrupting", "images")
        done = make_corrupted(images, out, **chosen)
    else:
        from mjp_privacy.data.sample import make_sample

        done = make_sample(images, out, **chosen, progress=choosing)
    print(done.text)
    return report_failed(done.failed, "not read; skipped.csv lists all")


def _shown(doing: str, units: str, entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entries, and show how many are done."""
    from mjp_privacy.core.progress import Progress

    with Progress(doing, lambda: len(entries), units) as bar:
        for entry in entries:
            yield entry
            bar.advance()
