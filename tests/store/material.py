"""What the tests of the store write: rows and pictures that a number determines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mjp_privacy.experiment.block_file import by_image
from mjp_privacy.experiment.store import RunStore, StoredFile, stored_files

CELL = {"run_id": "c1", "model": "ViT", "setting": "a", "gamma": 0.0, "attack": "april"}
CELL |= {"dtype": "float32", "seed": 0, "status": "ok", "notes": ["one", "two"], "round": None}


def rows_of(images: Mapping[str, int], status: str = "ok") -> pd.DataFrame:
    """A row for each image with the score of its number; what is not done has none."""
    numbers = pd.Series(list(images.values()), dtype=float)
    done = status == "ok"
    columns: dict[str, Any] = {
        "image_id": list(images),
        "label": pd.array([3] * len(images), dtype="Int64"),
        "label_source": "file",
        "group": list(images),
        "code": "c0ffee",
        "status": status,
        "reason": "" if done else "it broke",
        "psnr.standard": numbers if done else np.nan,
    }
    return pd.DataFrame(columns).assign(**{"stage_seconds.attack": 0.25})


def tensors_of(numbers: Sequence[int]) -> dict[str, Tensor]:
    """Every kind of picture that a run stores, by the numbers of their images."""
    number = torch.tensor(list(numbers), dtype=torch.int64)
    plain = ((number[:, None] + torch.arange(12)) % 256).float().div(255).reshape(-1, 3, 2, 2)
    return {
        "images": (number[:, None] / 1000 + torch.arange(12) / 77).float().reshape(-1, 3, 2, 2),
        "target": plain.clone(),
        "plain": plain,
        "input": plain.float() * 0.9 + 1e-3,
        "mask": (number[:, None] >> torch.arange(4)) % 2 == 1,
        "permutation": (number[:, None] + torch.arange(4)) % 4,
    }


def write(
    store: RunStore,
    images: Mapping[str, int],
    *,
    block: int = 0,
    cell: str = "c1",
    line: str | None = None,
    status: str = "ok",
) -> StoredFile:
    """Write images of a block by their numbers, with pictures where they were attacked; line: the
    key of the table's line that the cell belongs to, in place of its own."""
    facts = {**CELL, "run_id": cell, "cell_key": line or cell}
    about = {"cell": facts, "code": {"c0ffee": {"april.py": "1f"}}}
    done = images if status == "ok" else {}
    pictures = by_image(list(done), tensors_of(list(done.values())))
    path = store.write(cell, block, rows_of(images, status).assign(run_id=cell), pictures, about)
    return next(file for file in stored_files(path.parent) if file.path == path)


def scores(store: RunStore, cell: str = "c1") -> dict[str, float]:
    """What a reader sees of each image; -1: it was not done."""
    rows = store.read(cell)
    if "psnr.standard" not in rows:
        return dict.fromkeys(rows["image_id"], -1.0)
    return dict(
        zip(rows["image_id"], rows["psnr.standard"].fillna(-1.0).astype(float), strict=True)
    )


def same_pictures(found: Mapping[str, Tensor] | None, number: int) -> bool:
    """Whether these are the pictures of the image of this number, bit for bit."""
    if number < 0 or found is None:
        return number < 0 and found is None
    wanted = {name: tensor[0] for name, tensor in tensors_of([number]).items()}
    return wanted.keys() == found.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and found[name].numpy().tobytes() == tensor.numpy().tobytes()
        for name, tensor in wanted.items()
    )
