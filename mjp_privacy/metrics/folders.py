"""Two folders of image files, paired by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mjp_privacy.errors import UserError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})  # 8 bits at most
SHOWN = 20  # file names an error message lists


@dataclass(frozen=True)
class Pair:
    """The same image in both folders; `name` is its path inside either."""

    name: str
    reconstruction: Path
    reference: Path

    def read(self) -> tuple[Tensor, Tensor]:
        """Reconstruction and reference, (1, 3, H, W) float64 in [0, 1]."""
        return read_image(self.reconstruction), read_image(self.reference)


def pair_folders(
    reconstruction: Path, reference: Path, *, allow_missing: bool
) -> tuple[list[Pair], int]:
    """The pairs in the order of their names, and how many images have no partner.

    A missing partner is an error unless `allow_missing`; one that cannot be read, or has another
    size, always is.
    """
    left, right = _list_images(reconstruction), _list_images(reference)
    missing = [str(reference / name) for name in sorted(left.keys() - right.keys())]
    missing += [str(reconstruction / name) for name in sorted(right.keys() - left.keys())]
    if missing and not allow_missing:
        raise UserError(
            "Expected every image in both folders under the same name, extension included. Not "
            f"there:{_listing(missing)}\nSupply or rename them, or add --allow-missing to score "
            "the rest."
        )
    pairs = [Pair(name, left[name], right[name]) for name in sorted(left.keys() & right.keys())]
    if not pairs:
        raise UserError(
            f"Expected images of the same name in {reconstruction} and {reference}; got "
            f"{len(left)} and {len(right)} images with no name in common."
        )
    _check(pairs)
    return pairs, len(missing)


def read_image(path: Path) -> Tensor:
    """(1, 3, H, W) float64 in [0, 1]; a grey image becomes three equal channels."""
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode not in MODES:
                raise UserError(
                    f"{path}: expected an image of 8 bits a channel, got Pillow mode {image.mode}. "
                    "Save it as an 8-bit PNG."
                )
            if image.has_transparency_data and _least_alpha(image) < 255:
                raise UserError(
                    f"{path}: expected an opaque image, got transparent pixels, whose colour is "
                    "undefined. Save it without its alpha channel."
                )
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path}: expected an image file, but it cannot be read ({error}). Make it anew or "
            "remove it from both folders."
        ) from error
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None] / 255)


def _least_alpha(image: Image.Image) -> float:
    low, _ = image.convert("RGBA").getchannel("A").getextrema()
    assert isinstance(low, int | float)
    return low


def _list_images(folder: Path) -> dict[str, Path]:
    """Image files below a folder by their path inside it; hidden files are none."""
    if not folder.is_dir():
        raise UserError(f"Expected a folder of images, got {folder}, which is not a folder.")
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    }


def _check(pairs: Sequence[Pair]) -> None:
    """Read everything once, so that a bad file is found before hours of scoring, not after."""
    problems = []
    for pair in pairs:
        try:
            sizes = [tuple(image.shape[-2:]) for image in pair.read()]
        except UserError as error:
            problems.append(str(error))
            continue
        if sizes[0] != sizes[1]:
            (height, width), (wanted_height, wanted_width) = sizes
            problems.append(
                f"{pair.reconstruction}: expected {wanted_height}×{wanted_width} pixels as "
                f"{pair.reference}, got {height}×{width}. Bring both to one size."
            )
    if problems:
        raise UserError(f"Some images cannot be compared:{_listing(problems)}")


def _listing(names: Sequence[str]) -> str:
    return "\n  ".join(["", *names[:SHOWN], *_more(len(names))])


def _more(count: int) -> list[str]:
    return [f"and {count - SHOWN} more"] if count > SHOWN else []
