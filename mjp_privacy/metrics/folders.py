"""Two folders (or zips) of image files, paired by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.data.decoding import ImageError, decode_image
from mjp_privacy.data.files import Files, image_names, open_files

SHOWN = 20  # most lines of a list in an error message


@dataclass(frozen=True)
class Pair:
    """The same image in both folders; `name` is its path inside either."""

    name: str
    reconstructions: Files
    references: Files

    def read(self) -> tuple[Tensor, Tensor]:
        """Reconstruction and reference, (1, 3, H, W) float64 in [0, 1]."""
        return _read(self.reconstructions, self.name), _read(self.references, self.name)


def pair_folders(
    reconstruction: Path, reference: Path, *, allow_missing: bool
) -> tuple[list[Pair], int]:
    """The pairs in the order of their names, and how many images have no partner.

    A missing partner is an error unless `allow_missing` is set. A partner that cannot be read or
    has another size is always an error.
    """
    folders = open_files(reconstruction), open_files(reference)
    left, right = (set(image_names(folder)) for folder in folders)
    missing = [str(reference / name) for name in sorted(left - right)]
    missing += [str(reconstruction / name) for name in sorted(right - left)]
    if missing and not allow_missing:
        raise UserError(
            "Expected every image in both folders under the same name, extension included. "
            f"Missing:{_listing(missing)}\nSupply or rename them, or add --allow-missing to score "
            "the rest."
        )
    pairs = [Pair(name, *folders) for name in sorted(left & right)]
    if not pairs:
        raise UserError(
            f"Expected images of the same name, extension included, in {reconstruction} and "
            f"{reference}; got {len(left)} and {len(right)} images with no name in common."
        )
    problems = [problem for pair in pairs if (problem := _problem(pair))]
    if problems:
        raise UserError(
            "Expected pairs of readable images of the same size. These are not:"
            f"{_listing(problems)}\nReplace them, or take them out of both folders."
        )
    return pairs, len(missing)


def _problem(pair: Pair) -> str | None:
    """Why a pair cannot be scored, or None. All pairs are checked before the first is scored."""
    try:
        sizes = [tuple(image.shape[-2:]) for image in pair.read()]
    except ImageError as error:
        return str(error)
    if sizes[0] == sizes[1]:
        return None
    (height, width), (wanted_height, wanted_width) = sizes
    return (
        f"{pair.reconstructions.path / pair.name}: expected {wanted_height}×{wanted_width} pixels "
        f"as in {pair.references.path / pair.name}, got {height}×{width}"
    )


def _read(files: Files, name: str) -> Tensor:
    try:
        picture = decode_image(files.read(name))
    except ImageError as error:
        raise ImageError(error.reason, str(files.path / name)) from error
    return torch.from_numpy(np.asarray(picture).transpose(2, 0, 1)[None] / 255)


def _listing(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n  ".join(["", *lines[:SHOWN], *more])
