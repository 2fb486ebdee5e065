"""`mjp sample`: copies a few images of every class."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mjp_privacy.core.command import DONE, Usage
from mjp_privacy.core.shown import shown


@dataclass(frozen=True)
class SampleArguments:
    """Copy a few images of every class, with their labels and hashes."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="DIR_OR_ZIP")]
    """Folder or zip with labelled images."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """New or empty folder for the sample."""
    per_class: int = 1
    """Images of each class."""
    seed: int = 0
    """Seed of the choice."""
    labels: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Label file, such as a CSV with the header file,label."""


def sample(argv: list[str], usage: Usage) -> int:
    """Write the sample that `argv` describes and print what was chosen."""
    arguments = usage.parse(SampleArguments, argv)
    from mjp_privacy.data.images import open_images
    from mjp_privacy.data.sample import make_sample

    images = open_images(arguments.source, arguments.labels)
    count = len(images.records)
    print(f"{count} images in {shown(arguments.source)}. {images.labels_described}", flush=True)
    choice = {"per_class": arguments.per_class, "seed": arguments.seed}
    print(make_sample(images, arguments.out, progress=_progress, **choice))
    return DONE


def _progress(classes: Sequence[int]) -> Iterator[int]:
    """Yield the classes, with a progress bar on a terminal and ten lines of progress elsewhere."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(classes, "Choosing", console=console)
        return
    tenths = {len(classes) * tenth // 10 for tenth in range(1, 11)}
    for done, label in enumerate(classes, 1):
        yield label
        if done in tenths:
            print(f"chosen for {done} of {len(classes)} classes", file=sys.stderr, flush=True)
