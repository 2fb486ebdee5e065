"""A run folder of any number of made-up rows, in the layout of a run: for timing `mjp report`.

    python benchmarks/large_store.py /tmp/large --rows 1e8
    /usr/bin/time -v mjp report /tmp/large --out /tmp/large_report

Eighty cells are twenty checkpoints of a plain and an MJP client with two attacks each; a unit (an
image in a cell) has 25 rows, as in a real run. --blocks writes the files that a run writes, twenty
images in each, and compacts them afterwards; without it the compacted files are written at once,
which takes minutes in place of hours. A few images have stored pictures.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from mjp_privacy.experiment.compaction import compact
from mjp_privacy.experiment.part_file import OWN, part_name, write_part
from mjp_privacy.experiment.row_columns import CELL_COLUMNS, ROW_COLUMNS

from mjp_privacy.core.files import write_json
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import RunStore

CELLS = 80
BLOCK = 20
PICTURED = 20
SIDE = 32

METRICS = ("mse", "psnr", "ssim", "fft2d", "lpips")
KEYS = (
    *((metric, variant) for metric in METRICS for variant in ("standard", "paper")),
    *(("top1", variant) for variant in ("intact", "altered")),
    *(
        (name, "diagnostic")
        for name in (
            *("gradient_residual", "zero_rows", "nonzero_rows", "rank_a", "cond_a"),
            *("ceiling_psnr", "grey_psnr", "oracle_in_place_psnr", "mean_visible_psnr"),
            *("visible_psnr", "shuffled_patches", "moved_patches", "empty_mask"),
        )
    ),
)
"""What every unit has a row of: 25."""

ATTACKS = ("patch_gradient", "patch_prior", "masked_span", "pixel_lattice")


def cell_facts(number: int, images: int) -> dict[str, Any]:
    """The entry of cells.json of one cell: model, setting and attack from its number."""
    model, attack = divmod(number, len(ATTACKS))
    masks = attack >= 2
    entry = {
        **{"run_id": f"{number:016x}", "cell_key": f"{number:016x}", "status": "ok", "reason": ""},
        **{"model": f"ViT-S run {model:02d}", "architecture": "vit_small_patch16_224"},
        **{"checkpoint_sha": f"{model:064x}", "setting": "c" if masks else "a"},
        **{"gamma": 0.27 if masks else 0.0, "attack": ATTACKS[attack], "size": 224, "seed": 0},
        **{"attack_name": ATTACKS[attack], "dtype": "float32", "victim": "intact", "mode": "eval"},
        **{"loss": "cross_entropy", "batch": 1, "dal": False, "planned_images": images},
        **{"position_embedding": "learned", "engine": "batched", "trained_gamma": 0.0},
        **{"data": "made up", "labels": "", "true_labels": True, "first_block": "standard"},
    }
    return dict(CellFacts.read(entry).columns)


def image_ids(count: int) -> list[str]:
    """Names as long as those of ImageNet's validation set."""
    return [f"n{at // 50:08d}/ILSVRC2012_val_{at:08d}.JPEG" for at in range(count)]


def unit_values(number: int, first: int, count: int) -> dict[tuple[str, str], Any]:
    """(count,) values by metric and variant, of images from `first` on in one cell."""
    draws = np.random.default_rng([number, first])
    psnr = draws.normal(18 + number % 7, 4, count)
    mse = 10 ** (-psnr / 10)
    by_name = {
        **{"mse": mse, "psnr": psnr, "ssim": 1 - mse**0.3, "fft2d": mse / 7, "lpips": mse**0.5},
        **{"top1": (draws.random(count) < 0.8).astype(float), "cond_a": 10 ** (psnr / 5)},
        **{"zero_rows": np.full(count, 53.0 if number % len(ATTACKS) >= 2 else 0.0)},
        **{"grey_psnr": draws.normal(11, 2, count), "ceiling_psnr": psnr + 30},
        **{"gradient_residual": draws.random(count), "empty_mask": np.zeros(count)},
    }
    other = draws.normal(20, 4, count)
    return {
        (name, variant): by_name.get(name, other) * (1.01 if variant == "paper" else 1)
        for name, variant in KEYS
    }


def equal_columns(facts: dict[str, Any]) -> dict[str, Any]:
    """The columns that all rows of a cell share, in the order in which a run writes them."""
    names = dict.fromkeys((*ROW_COLUMNS, *CELL_COLUMNS, "group"))
    texts = {"status": "ok", "reason": "", "label_source": "synset", "code": "c0de"}
    numbers = dict.fromkeys(("trained_gamma", "dal_lambda", "round"), float("nan"))
    return {name: facts.get(name, numbers.get(name)) for name in names} | texts


def block_frame(facts: dict[str, Any], number: int, first: int, ids: Sequence[str]) -> pd.DataFrame:
    """The rows of one block in one cell, as a run hands them to the store."""
    by_key = unit_values(number, first, len(ids))
    rows = pd.DataFrame(equal_columns(facts), index=range(len(ids) * len(KEYS)))
    rows["image_id"] = rows["group"] = np.repeat(list(ids), len(KEYS))
    for at, name in enumerate(("metric", "variant")):
        rows[name] = [key[at] for key in KEYS] * len(ids)
    return rows.assign(value=np.stack([*by_key.values()], axis=1).reshape(-1))


def part_tables(facts: dict[str, Any], number: int, first: int, ids: Sequence[str]) -> list[Any]:
    """The rows of these images in one cell, as `write_part` takes them: ids are in order."""
    count, kinds = len(ids), len(KEYS)
    place = np.arange(count, dtype=np.int32)
    names = pa.array(list(ids))
    own = {
        "block": pa.array(((first + place) // BLOCK).astype(np.int32)),
        "unit": pa.array(place),
        "done": pa.array(np.ones(count, dtype=bool)),
    }
    shared = {name: repeated(value, count) for name, value in equal_columns(facts).items()}
    tables = []
    for at, (key, values) in enumerate(unit_values(number, first, count).items()):
        words = {"metric": repeated(key[0], count), "variant": repeated(key[1], count)}
        columns = {"image_id": names, "group": names, **words, "value": pa.array(values)}
        row = pa.array(((place % BLOCK) * kinds + at).astype(np.int32))
        rows = shared | columns | own | {"row": row}
        tables.append((key, pa.table({n: rows[n] for n in (*shared, *OWN)})))
    return tables


def repeated(value: Any, times: int) -> pa.Array:
    """A column of equal entries."""
    if not isinstance(value, str):
        return pa.repeat(pa.scalar(value, pa.string() if value is None else None), times)
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(times, np.int32)), pa.array([value]))


def portions(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(0, size), (size, 2 size), … up to count."""
    return ((first, min(first + size, count)) for first in range(0, count, size))


def write_store(root: Path, images: int, *, blocks: bool) -> None:
    """Write the whole folder."""
    store, ids = RunStore(root), image_ids(images)
    cells = [cell_facts(number, images) for number in range(CELLS)]
    for number, facts in enumerate(cells):
        for first, last in portions(images, BLOCK if blocks else 80_000):
            if blocks:
                rows = block_frame(facts, number, first, ids[first:last])
                store.write_rows(facts["run_id"], first // BLOCK, rows)
                continue
            path = store.rows_folder(facts["run_id"]) / part_name(first // 80_000)
            made = part_tables(facts, number, first, ids[first:last])
            write_part(path, made)
        write_pictures(store, facts["run_id"], ids[:PICTURED])
    write_beside(store, ids, cells)
    store.write_cells(cells)
    if blocks:
        compact(store, fewest_files=1)


def write_pictures(store: RunStore, run_id: str, ids: Sequence[str]) -> None:
    """Stored pictures of a few images."""
    for first, last in portions(len(ids), BLOCK):
        draws = torch.Generator().manual_seed(first)
        shape = (last - first, 3, SIDE, SIDE)
        plain = torch.randint(256, shape, generator=draws).float() / 255
        tensors = {"images": torch.rand(shape, generator=draws), "plain": plain}
        tensors["target"] = tensors["plain"].clone()
        store.write_reconstructions(run_id, first // BLOCK, tensors, list(ids[first:last]))


def write_beside(store: RunStore, ids: Sequence[str], cells: Sequence[dict[str, Any]]) -> None:
    """images.csv, experiment.yaml, code.json, and the times of every block and stage."""
    known = {"label_source": "synset", "sha256": "0" * 64, "pixel_sha256": "0" * 64}
    images = {"image_id": ids, "label": np.arange(len(ids)) % 1000, **known}
    store.write_images(pd.DataFrame(images).assign(status="ok", reason=""))
    (store.root / "experiment.yaml").write_text("experiment: {name: large_store}\n")
    write_json(store.root / "code.json", {"c0de": {"attacks/__init__.py": "0" * 64}})
    blocks = -(-len(ids) // BLOCK)
    lines = [
        json.dumps(
            {"run_id": cell["run_id"], "stage": stage, "seconds": 1.5, "images": BLOCK}
            | {"device": "cpu", "threads": 2}
        )
        + "\n"
        for cell in cells
        for stage in ("gradient", "attack", "score")
    ]
    with (store.root / "timings.jsonl").open("w") as file:
        for line in lines:
            file.write(line * blocks)


def main() -> None:
    """Write the folder that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder to write; it must not exist")
    parser.add_argument("--rows", type=float, default=1e6, help="how many rows, about")
    parser.add_argument("--blocks", action="store_true", help="write blocks, then compact them")
    given = parser.parse_args()
    if given.run.exists():
        parser.error(f"{given.run} exists; give a folder that does not")
    started = time.perf_counter()
    images = round(given.rows / CELLS / len(KEYS))
    write_store(given.run, images, blocks=given.blocks)
    files = [path for path in given.run.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{images * CELLS * len(KEYS):,} rows, {images:,} images in {CELLS} cells: ", end="")
    print(f"{len(files)} files, {size:.0f} MB, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
