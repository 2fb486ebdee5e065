"""`mjp fit-prior`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from attacks.prior.files import save_prior
from attacks.prior.fitting import fit_prior
from mjp_privacy.core.command import DONE, Usage
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError, load_images


@dataclass(frozen=True)
class FitArguments:
    """Fit a Gaussian prior from pictures. Never from pictures that will be attacked."""

    images: Path
    """A folder or zip of pictures, a few hundred or more."""
    patch: int
    """Side of a patch in pixels, the attacked model's."""
    out: Path
    """The file to write, NAME.safetensors."""
    size: int | None = None
    """Side to which pictures are brought before they are cut, the attacked model's input size; 14
    patches if not given."""
    limit: int | None = None
    """How many pictures to use, spread over the folder."""


def fit(argv: list[str], usage: Usage) -> int:
    given = usage.parse(FitArguments, argv)
    patch, out = given.patch, given.out
    if patch < 2:
        raise UserError(f"--patch: expected at least 2 pixels, got {patch}.")
    size = 14 * patch if given.size is None else given.size
    if size < patch or size % patch:
        raise UserError(f"--size: expected a multiple of the patch's {patch} pixels, got {size}.")
    if out.suffix != ".safetensors":
        raise UserError(f"--out: expected a name that ends in .safetensors, got {out}.")
    prior = fit_prior(_pictures(given.images, size, given.limit), patch=patch, size=size)
    save_prior(prior, out)
    print(f"Wrote {out} ({out.stat().st_size / 1000:.0f} kB): {prior.description}.")
    return DONE


def _pictures(images: Path, size: int, limit: int | None) -> Iterator[Tensor]:
    def say(error: ImageError) -> None:
        print(f"left out: {error}", file=sys.stderr)

    loaded = load_images(images, size=size, limit=limit, on_error=say)
    for count, image in enumerate(loaded, 1):
        if count % 100 == 0:
            print(f"{count} pictures", file=sys.stderr)
        yield image.image
