"""Small runs: a few PNGs, tiny random models, and how to read what a run left."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from safetensors import safe_open

from mjp_privacy.experiment.run import RunSummary, run_experiment
from mjp_privacy.experiment.store import RunStore

SIDE, PATCH = 32, 8  # LPIPS needs 31 pixels
KEYS = ["run_id", "image_id", "metric", "variant"]

TINY: dict[str, Any] = {
    "checkpoint": "random",
    "img_size": SIDE,
    "patch_size": PATCH,
    "embed_dim": 192,
    "depth": 1,
    "num_heads": 3,
    "num_classes": 10,
    "mean": 0.5,
    "std": 0.5,
}
MJP = {**TINY, "unknown_embedding": True, "dal": "nonlinear"}


def tiny(**changes: Any) -> dict[str, Any]:
    """A config: a plain and an MJP model in settings a, b and c, in blocks of three images."""
    content: dict[str, Any] = {
        "name": "tiny",
        "block": 3,
        "models": {"ViT": TINY, "MJP": MJP},
        "grid": [
            {"models": ["ViT", "MJP"], "settings": ["a", "b"], "gammas": [0.5]},
            {"models": ["MJP"], "settings": ["c"], "gammas": [0.5]},
        ],
    }
    return content | changes


def one_cell(**changes: Any) -> dict[str, Any]:
    """A config of one model in setting a."""
    grid = [{"models": ["ViT"], "settings": ["a"]}]
    return tiny(**({"models": {"ViT": TINY}, "grid": grid} | changes))


def names(count: int) -> list[str]:
    return [f"{index}.png" for index in range(count)]


def photograph(seed: int, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """Smooth colours and some noise, (width, height)."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(20, 236, (4, 4, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)).astype(float)
    return Image.fromarray((smooth + random.normal(0, 6, smooth.shape)).clip(0, 255).astype("u1"))


def photographs(root: Path, count: int = 6, *, labelled: bool = True, first: int = 0) -> Path:
    """A flat folder of PNGs; the k-th is of class k mod 10 in labels.csv."""
    root.mkdir(parents=True, exist_ok=True)
    lines = ["file,label"]
    for index in range(first, first + count):
        photograph(index).save(root / f"{index}.png")
        lines.append(f"{index}.png,{index % 10}")
    if labelled:
        (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def attack(
    images: Path, out: Path, config: Mapping[str, Any] | None = None, **arguments: Any
) -> RunSummary:
    return run_experiment(config or tiny(), images=images, out=out, device="cpu", **arguments)


# what a run left ----------------------------------------------------------------------------------


def cells(out: Path) -> list[dict[str, Any]]:
    return RunStore(out).read_cells()


def cell(out: Path, **wanted: Any) -> dict[str, Any]:
    """The only cell with these entries."""
    found = [entry for entry in cells(out) if wanted.items() <= entry.items()]
    assert len(found) == 1, f"{len(found)} cells are {wanted}"
    return found[0]


def rows(out: Path, run_ids: Iterable[str] | None = None) -> pd.DataFrame:
    """Rows of the cells of the table, in one fixed order, as a report would read them."""
    wanted = [entry["run_id"] for entry in cells(out)] if run_ids is None else run_ids
    parts = [RunStore(out).read_rows(run_id) for run_id in wanted]
    return pd.concat(parts).sort_values(KEYS, kind="stable").reset_index(drop=True)


def values(out: Path, **wanted: Any) -> pd.Series:
    """Values of a cell's rows by image, metric and variant."""
    found = rows(out, [cell(out, **wanted)["run_id"]])
    return found.set_index(KEYS[1:])["value"].sort_index()


def same_rows(one: Path, other: Path) -> None:
    """Every column of every row is equal, to the last bit."""
    pd.testing.assert_frame_equal(rows(one), rows(other), check_exact=True)


def same_results(one: Path, other: Path) -> None:
    """Rows and files of pictures are equal, to the last bit."""
    same_rows(one, other)
    assert picture_files(one) == picture_files(other)


def picture_files(out: Path) -> dict[str, bytes]:
    """Every file of reconstructions by its place in the run folder."""
    files = out.glob("reconstructions/*/*")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def tensors(out: Path, run_id: str) -> dict[str, dict[str, torch.Tensor]]:
    """The stored tensors of a cell by image id."""
    store = RunStore(out)
    found = {}
    for path in sorted((out / "reconstructions" / run_id).glob("[0-9]*.safetensors")):
        with safe_open(path, framework="pt") as file:
            ids = file.metadata()["image_ids"]
        for image_id in json.loads(ids):
            stored = store.find_reconstruction(run_id, image_id)
            assert stored is not None
            found[image_id] = stored
    return found


def written(out: Path) -> dict[str, int]:
    """Time of the last change of every file of rows and reconstructions."""
    paths = [*out.glob("rows/*/*"), *out.glob("reconstructions/*/*")]
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in paths}
