"""Small runs: a few PNGs, tiny random models, and how to read what a run left."""

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from safetensors.torch import save_file

from attacks.budget import OVER, SECONDS, over_budget
from mjp_privacy import load_model
from mjp_privacy.experiment.run import RunSummary, run_experiment
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.lines import DIAGNOSTIC, IMAGE, keys_of, read_frame

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


def long_rows(frame: pd.DataFrame, facts: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """A row for each image, metric and variant, by image, with the facts of the cell as columns.

    An image that was attacked has every score, and the diagnostics that apply to it; one that was
    not attacked or not scored has its status and reason in place of every score.
    """
    keys = keys_of(frame)
    values = frame.reindex(columns=[f"{metric}.{variant}" for metric, variant in keys])
    scores = values.to_numpy(np.float64)  # an image down, a metric across
    of_images = frame.reindex(columns=IMAGE[1:]).astype(object).reset_index()
    status, reason = (
        np.repeat(of_images[[name]].to_numpy(), len(keys), axis=1) for name in ("status", "reason")
    )
    shown, known = np.full(scores.shape, True), ~np.isnan(scores)
    none = np.full(len(frame), np.nan)
    over, had = (frame.get(f"{name}.{DIAGNOSTIC}", none) for name in (OVER, SECONDS))
    late = [over_budget(s) if o == 1 else "" for o, s in zip(over, had, strict=True)]
    for at, (metric, variant) in enumerate(keys):
        if variant == DIAGNOSTIC:
            status[:, at], reason[:, at], shown[:, at] = "ok", late, known[:, at]
        elif metric == "top1" and (unknown := ~known[:, at] & (status[:, at] == "ok")).any():
            intact = None if variant == "intact" else frame.get("top1.intact")
            other_model = intact is not None and intact[unknown].notna().any()
            status[unknown, at], reason[unknown, at] = "unscored", "the images carry no true labels"
            if other_model or f"top1.{variant}" not in frame:
                shown[:, at] = ~unknown
    image, key = np.nonzero(shown)  # by image, then by metric
    names = np.array(keys, dtype=object).reshape(-1, 2)[key]
    rows: dict[str, Any] = {"image_id": of_images["image_id"].to_numpy()[image]}
    rows |= {"metric": names[:, 0], "variant": names[:, 1], "value": scores[shown]}
    rows |= {"status": status[shown], "reason": reason[shown]}
    rows |= {name: of_images[name].to_numpy()[image] for name in IMAGE[3:]}
    more = {n: v for n, v in (facts or {}).items() if not isinstance(v, (list, tuple, dict))}
    return pd.DataFrame(more | rows, columns=[*rows, *(name for name in more if name not in rows)])


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


FACTS = {"mean": 0.5, "std": 0.5, "num_heads": 3}
"""What weights do not show of a tiny model."""


def weights(path: Path, facts: Mapping[str, Any] = FACTS, **changes: Any) -> Path:
    """A file of weights of a tiny model, whose metadata have these facts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {key: json.dumps(value) for key, value in facts.items()}
    save_file(load_model(**{**TINY, **changes}).state_dict(), path, metadata)
    return path


def attack(
    images: Path, out: Path, config: Mapping[str, Any] | None = None, **arguments: Any
) -> RunSummary:
    return run_experiment(config or tiny(), images=images, out=out, device="cpu", **arguments)


def flip(path: Path, share: float = 0.5, bit: int = 0) -> None:
    """Change one bit of a file, at this share of it."""
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


# what a run left ----------------------------------------------------------------------------------


def cells(out: Path) -> list[dict[str, Any]]:
    return RunStore(out).read_cells()


def cell(out: Path, **wanted: Any) -> dict[str, Any]:
    """The only cell with these entries."""
    found = [entry for entry in cells(out) if wanted.items() <= entry.items()]
    assert len(found) == 1, f"{len(found)} cells are {wanted}"
    return found[0]


def rows(out: Path, run_ids: Iterable[str] | None = None) -> pd.DataFrame:
    """A row for each image, metric and variant of the cells of the table, in one fixed order."""
    store, listed = RunStore(out), {entry["run_id"]: entry for entry in cells(out)}
    wanted = listed if run_ids is None else run_ids
    for entry in listed.values():  # which images the last command was given
        entry.pop("data", None), entry.pop("planned_images", None)
    parts = [long_rows(read_frame(store, run_id), listed.get(run_id, {})) for run_id in wanted]
    parts = [part.assign(run_id=run_id) for part, run_id in zip(parts, wanted, strict=True)]
    with warnings.catch_warnings():  # a column that one cell has no value in has no type there
        warnings.simplefilter("ignore", FutureWarning)
        found = pd.concat(parts)
    return found.sort_values(KEYS, kind="stable").reset_index(drop=True)


def values(out: Path, **wanted: Any) -> pd.Series:
    """Values of a cell's rows by image, metric and variant."""
    found = rows(out, [cell(out, **wanted)["run_id"]])
    return found.set_index(KEYS[1:])["value"].sort_index()


def outcome(out: Path, **wanted: Any) -> dict[str, tuple[str, str]]:
    """Status and reason of each image in a cell."""
    found = RunStore(out).read(cell(out, **wanted)["run_id"], ["image_id", "status", "reason"])
    return {row.image_id: (row.status, row.reason) for row in found.itertuples()}


def same_rows(one: Path, other: Path) -> None:
    """Every column of every row is equal, to the last bit."""
    pd.testing.assert_frame_equal(rows(one), rows(other), check_exact=True)


def same_results(one: Path, other: Path) -> None:
    """Rows and pictures are equal, to the last bit."""
    same_rows(one, other)
    for entry in cells(one):
        same_tensors(tensors(one, entry["run_id"]), tensors(other, entry["run_id"]))


Tensors = Mapping[str, Mapping[str, torch.Tensor]]


def same_tensors(one: Tensors, other: Tensors) -> None:
    """The same images have the same tensors, to the last bit."""
    assert one.keys() == other.keys()
    for image_id, stored in one.items():
        assert stored.keys() == other[image_id].keys()
        assert all(stored[name].equal(other[image_id][name]) for name in stored), image_id


def tensors(out: Path, run_id: str) -> dict[str, dict[str, torch.Tensor]]:
    """The stored tensors of a cell by image id."""
    store = RunStore(out)
    found = {image_id: store.pictures(run_id, image_id) for image_id in store.pictured(run_id)}
    return {image_id: stored for image_id, stored in found.items() if stored is not None}


def written(out: Path) -> dict[str, int]:
    """Time of the last change of every file of rows and pictures."""
    return {str(p.relative_to(out)): p.stat().st_mtime_ns for p in out.glob("rows/*/*.parquet")}


def logged(out: Path) -> list[dict[str, Any]]:
    """The entries of a run's log."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def said(out: Path) -> str:
    """The messages of a run's log, in order, a line each."""
    return "\n".join(str(entry["message"]) for entry in logged(out))
