"""Patches that a picture holds more than once: where one of them is masked, all twins are hidden.

python -m tools.repeated_patches IMAGES --size 192 --patch 16 --out results/ladder/repeats.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mjp_privacy.data.images import Preprocessing
from mjp_privacy.data.opening import open_images
from tools.published_rows import REPEATS


def repeated_patches(picture: Any, patch: int) -> int:
    """How many patches equal another patch of the same picture in every 8-bit value.

    picture: (3, H, W) in [0, 1]. A uniform picture of 4 patches gives 4. Where an upload masks one
    of them, all its twins are hidden.
    """
    levels = np.rint(np.clip(np.asarray(picture), 0, 1) * 255).astype(np.uint8)
    parts = levels.reshape(3, levels.shape[1] // patch, patch, -1, patch).transpose(1, 3, 0, 2, 4)
    _, counts = np.unique(parts.reshape(-1, 3 * patch * patch), axis=0, return_counts=True)
    return int(counts[counts > 1].sum())


def count_repeats(images: Path, size: int, patch: int) -> pd.DataFrame:
    """image_id, label and repeated patches of each picture, cropped as a run crops it."""
    source, crop = open_images(images), Preprocessing(size)
    rows = [
        (one.image_id, one.label, repeated_patches(crop(source.decode(one)), patch))
        for one in source.records
    ]
    return pd.DataFrame(rows, columns=["image_id", "label", REPEATS])


def main() -> None:
    """Write the count of every picture of a folder as CSV."""
    parser = argparse.ArgumentParser(description=repeated_patches.__doc__)
    parser.add_argument("images", type=Path, help="a folder or zip of pictures")
    parser.add_argument("--size", type=int, required=True, help="side of the picture, such as 192")
    parser.add_argument("--patch", type=int, required=True, help="side of a patch, such as 16")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    counted = count_repeats(given.images, given.size, given.patch)
    counted.to_csv(given.out, index=False, lineterminator="\n")
    print(f"{given.out}: {(counted[REPEATS] > 0).sum()} of {len(counted)} pictures repeat a patch")


if __name__ == "__main__":
    main()
