"""python -m attacks.prior fit --images DIR --patch 16 --out mine.safetensors"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import tyro
from torch import Tensor

from attacks.prior.files import save_prior
from attacks.prior.fitting import fit_prior
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageError, load_images


def fit(
    images: Path, patch: int, out: Path, size: int | None = None, limit: int | None = None
) -> None:
    """Fit a Gaussian prior from pictures. Never from pictures that will be attacked.

    Args:
        images: a folder or zip of pictures, a few hundred or more
        patch: side of a patch in pixels, the attacked model's
        out: the file to write, NAME.safetensors
        size: side to which pictures are brought before they are cut, the attacked model's input
            size; 14 patches if not given
        limit: how many pictures to use, spread over the folder
    """
    if patch < 2:
        raise UserError(f"--patch: expected at least 2 pixels, got {patch}.")
    size = 14 * patch if size is None else size
    if size < patch or size % patch:
        raise UserError(f"--size: expected a multiple of the patch's {patch} pixels, got {size}.")
    if out.suffix != ".safetensors":
        raise UserError(f"--out: expected a name that ends in .safetensors, got {out}.")
    prior = fit_prior(_pictures(images, size, limit), patch=patch, size=size)
    save_prior(prior, out)
    print(f"Wrote {out} ({out.stat().st_size / 1000:.0f} kB): {prior.description}.")


def _pictures(images: Path, size: int, limit: int | None) -> Iterator[Tensor]:
    def say(error: ImageError) -> None:
        print(f"left out: {error}", file=sys.stderr)

    loaded = load_images(images, size=size, limit=limit, on_error=say)
    for count, image in enumerate(loaded, 1):
        if count % 100 == 0:
            print(f"{count} pictures", file=sys.stderr)
        yield image.image


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 2 after an error of the user's, which is printed."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"fit": fit}, prog="python -m attacks.prior", args=arguments
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
