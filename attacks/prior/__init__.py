"""Gaussian priors: what pictures look like before an upload is seen, and how to fit such a prior.

    mjp fit-prior --images DIR --patch 16 --out mine.safetensors

A prior describes pixels in [0, 1] and is converted to each model's own mean and std. Attacks take
`prior: fitted` (shipped, from 400 public photographs; for patch sizes other than 16 and 7 the
covariance of a patch is derived from the fitted spectrum), `prior: stationary` (three round
numbers, no data) or the path of a fitted file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mjp_privacy.core.command import Usage, report_failed
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_file
from mjp_privacy.core.text import shown
from mjp_privacy.data.images import keep_apart

MADE = ("fitted", "stationary")
"""Priors that need no file of the user's."""


def check_prior(name: str) -> None:
    """Raise UserError unless the prior can be read, if it is a file."""
    if name in MADE:
        return
    from attacks.prior.files import find_prior

    find_prior(name, patch=16, size=224)  # a file is the same for every patch and size


# the command that fits one ------------------------------------------------------------------------


FEWEST_PIXELS = 2
MOST_SIZE = 2048  # pixels a side: nine sums for each of its frequencies are kept

if TYPE_CHECKING:
    from torch import Tensor

    from mjp_privacy.data import ImageError


@dataclass(frozen=True)
class FitArguments:
    """Fit a Gaussian prior to pictures. Do not use pictures that will be attacked."""

    images: Path
    """A folder or zip of pictures, a few hundred or more."""
    patch: int
    """Side of a patch of the attacked model, in pixels."""
    out: Path
    """The file to write, NAME.safetensors."""
    size: int | None = None
    """Side in pixels to which pictures are resized before they are cut into patches: the attacked
    model's input size. If not given, 14 patches a side."""
    limit: int | None = None
    """How many pictures to use, spread over the folder; all if not given."""


def fit(argv: list[str], usage: Usage) -> int:
    """`mjp fit-prior`: fit a prior to the pictures and write it."""
    arguments = usage.parse(FitArguments, argv)
    from attacks.prior.files import MOST_PATCH, save_prior
    from attacks.prior.gaussian import fit_prior
    from mjp_privacy.data import load_images

    patch, out = arguments.patch, arguments.out
    if not FEWEST_PIXELS <= patch <= MOST_PATCH:
        raise UserError(
            f"--patch: expected at least {FEWEST_PIXELS} pixels and at most {MOST_PATCH}, got "
            f"{patch}."
        )
    size = 14 * patch if arguments.size is None else arguments.size
    if not patch <= size <= MOST_SIZE or size % patch:
        raise UserError(
            f"--size: expected a multiple of the patch's {patch} pixels, got {size} (at most "
            f"{MOST_SIZE})."
        )
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit: expected 1 picture or more, got {arguments.limit}.")
    if out.suffix != ".safetensors":
        raise UserError(f"--out: expected a name that ends in .safetensors, got {shown(out)}.")
    keep_apart(out, {"--images": arguments.images})
    output_file(out)
    failed: dict[str, str] = {}

    def report(error: ImageError) -> None:
        failed[error.image_id] = error.reason

    def pictures() -> Iterator[Tensor]:
        """Those that can be read, (3, size, size)."""
        loaded = load_images(arguments.images, size=size, limit=arguments.limit, on_error=report)
        for count, image in enumerate(loaded, 1):
            if count % 100 == 0:
                print(f"{count} pictures", file=sys.stderr)
            yield image.image

    try:
        prior = fit_prior(pictures(), patch=patch, size=size)
    except UserError:
        report_failed(failed, "left out")
        raise
    save_prior(prior, out)
    print(f"Wrote {shown(out)} ({out.stat().st_size / 1000:.0f} kB): {prior.description}.")
    return report_failed(failed, "left out")
