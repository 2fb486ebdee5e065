"""Small folders and zips of images for the tests of mjp_privacy.data."""

import zipfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

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
