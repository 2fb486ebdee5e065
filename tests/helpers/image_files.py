"""Small folders and zips of images for the tests of mjp_privacy.data."""

import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import open_images

FLAT_VAL = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 5)]


def make_images(root: Path, names: Iterable[str], size: tuple[int, int] = (8, 8)) -> Path:
    """One-coloured images; the k-th has the grey level k."""
    for level, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (level % 256,) * 3).save(path)
    return root


def zipped(folder: Path, prefix: str = "") -> Path:
    """A zip of the folder beside it, with everything under `prefix`."""
    path = folder.with_name(folder.name + ".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, prefix + file.relative_to(folder).as_posix())
    return path


def noise(width: int = 12, height: int = 8, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(width * 1000 + height + seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def error_of(path: str | Path, labels: Path | None = None) -> str:
    """Why images are not opened, in one line."""
    with pytest.raises(UserError) as caught:
        open_images(path, labels)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message
