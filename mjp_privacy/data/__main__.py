"""Command line: `python -m mjp_privacy.data sample --from DIR_OR_ZIP --out DIR`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import track

from mjp_privacy.core.errors import UserError
from mjp_privacy.data.images import open_images
from mjp_privacy.data.sample import make_sample


def sample(
    source: Annotated[str, tyro.conf.arg(name="from", metavar="DIR_OR_ZIP")],
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    per_class: int = 1,
    seed: int = 0,
    labels: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
) -> None:
    """Copy a few images of every class, with their labels and hashes.

    Args:
        source: folder or zip with labelled images
        out: new or empty folder for the sample
        per_class: images of each class
        seed: seed of the choice
        labels: label file, such as a CSV with the header file,label
    """
    images = open_images(source, labels)
    print(f"{len(images.records)} images in {source}. {images.labels_described}", flush=True)
    print(make_sample(images, out, per_class=per_class, seed=seed, progress=_progress))


def _progress(classes: Sequence[int]) -> Iterator[int]:
    """A bar on a terminal, elsewhere a line for every tenth of the classes."""
    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(classes, "Choosing", console=console)
        return
    tenths = {len(classes) * tenth // 10 for tenth in range(1, 11)}
    for done, label in enumerate(classes, 1):
        yield label
        if done in tenths:
            print(f"chosen for {done} of {len(classes)} classes", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 2 after an error of the user's, which is printed."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"sample": sample}, prog="python -m mjp_privacy.data", args=arguments
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
