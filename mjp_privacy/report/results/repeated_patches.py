"""Patches that a picture holds more than once; where one of them is masked, all twins are hidden.

python -m mjp_privacy.report.results.repeated_patches IMAGES --size 192 --patch 16 --out repeats.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from torch import Tensor

from mjp_privacy.report.results.columns import REPEATS


def repeated_patches(image: Tensor, patch: int) -> int:
    """How many patches equal another patch of the same picture in every 8-bit value.

    image: (3, H, W) in [0, 1]. A uniform picture of 4 patches gives 4.
    """
    levels = (image.clamp(0, 1) * 255).round().byte()
    parts = levels.unfold(1, patch, patch).unfold(2, patch, patch)  # (3, rows, columns, p, p)
    rows = parts.permute(1, 2, 0, 3, 4).reshape(-1, 3 * patch * patch)
    _, counts = rows.unique(dim=0, return_counts=True)
    return int(counts[counts > 1].sum())


def count_repeats(
    images: Path,
    *,
    size: int,
    patch: int,
    resize: int | None = None,
    interpolation: str = "bicubic",
) -> pd.DataFrame:
    """One row for each picture of a folder: image_id, label, repeated_patches.

    size, resize, interpolation: as the run's cells have them, so that the same pixels are compared.
    """
    from mjp_privacy.data.images import open_images
    from mjp_privacy.data.transforms import Preprocessing

    source = open_images(images)
    crop = Preprocessing(size, resize, interpolation)  # type: ignore[arg-type]
    rows = [
        (record.image_id, record.label, repeated_patches(crop(source.decode(record)), patch))
        for record in source.records
    ]
    return pd.DataFrame(rows, columns=["image_id", "label", REPEATS])


def main(argv: Sequence[str] | None = None) -> None:
    """Write the count of every picture of a folder as CSV."""
    parser = argparse.ArgumentParser(description=repeated_patches.__doc__)
    parser.add_argument("images", type=Path, help="a folder or zip of pictures")
    parser.add_argument("--size", type=int, required=True, help="side of the picture, such as 192")
    parser.add_argument("--patch", type=int, required=True, help="side of a patch, such as 16")
    parser.add_argument("--resize", type=int, help="short side before the centre crop")
    parser.add_argument("--interpolation", default="bicubic")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    counted = count_repeats(
        given.images,
        size=given.size,
        patch=given.patch,
        resize=given.resize,
        interpolation=given.interpolation,
    )
    counted.to_csv(given.out, index=False, lineterminator="\n")
    print(f"{given.out}: {(counted[REPEATS] > 0).sum()} of {len(counted)} pictures repeat a patch")


if __name__ == "__main__":
    main()
