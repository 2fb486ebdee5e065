"""Two folders (or zips) of image files, paired by name."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.data.decoding import Altered, ImageError, decoded
from mjp_privacy.data.files import Files, image_names, open_files

SHOWN = 20  # most lines of a list in an error message


@dataclass(frozen=True)
class Pair:
    """The same image in both folders; `name` is its path inside either."""

    name: str
    reconstructions: Files
    references: Files
    altered: Altered = field(default_factory=Altered, compare=False)
    """Files that were turned, or are animations, of all pairs that were read so far."""

    def read(self) -> tuple[Tensor, Tensor]:
        """Reconstruction and reference, (1, 3, H, W) float64 in [0, 1].

        UserError where one cannot be read, or where they differ in size.
        """
        pictures = self._decoded(self.reconstructions), self._decoded(self.references)
        (width, height), (wanted_width, wanted_height) = (picture.size for picture in pictures)
        if (width, height) != (wanted_width, wanted_height):
            raise UserError(
                f"{shown(self.reconstructions.path / self.name)}: expected "
                f"{wanted_height}×{wanted_width} pixels as in "
                f"{shown(self.references.path / self.name)}, got {height}×{width}"
            )
        return _pixels(pictures[0]), _pixels(pictures[1])

    def _decoded(self, files: Files) -> Image.Image:
        where = shown(files.path / self.name)
        try:
            picture, turn, animated = decoded(files.read(self.name))
        except ImageError as error:
            raise ImageError(error.reason, where) from error
        self.altered.note(where, turn, animated)
        return picture


def pair_folders(
    reconstruction: Path, reference: Path, *, allow_missing: bool
) -> tuple[list[Pair], int]:
    """The pairs in the order of their names, and how many images have no partner.

    A missing partner is an error unless `allow_missing` is set. Nothing is decoded here.
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
    altered = Altered()
    pairs = [Pair(name, *folders, altered) for name in sorted(left & right)]
    if not pairs:
        raise UserError(
            f"Expected images of the same name, extension included, in {shown(reconstruction)} and "
            f"{shown(reference)}; got {len(left)} and {len(right)} images with no name in common."
        )
    return pairs, len(missing)


def _pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(picture).transpose(2, 0, 1)[None] / 255)


def _listing(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n  ".join(["", *map(shown, lines[:SHOWN]), *more])
