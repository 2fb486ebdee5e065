"""A run folder without an attack: cells and rows as the runner writes them, with known figures."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from mjp_privacy.experiment.block_file import by_image
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import clients_of, derived_lines
from mjp_privacy.report.figures import DerivedLine
from mjp_privacy.report.lines import Line
from mjp_privacy.report.runs import load_runs
from tests.helpers.runs import long_rows

BLOCK = 8
HOSTILE = r"<script>alert(1)</script> & 50%_x|y $^2$ {\o}"
"""A model label that is markup in every language a report is written in."""


def cell(run_id: str, **changes: Any) -> dict[str, Any]:
    """The facts of one cell, as the list of cells holds them."""
    entry: dict[str, Any] = {
        **{"run_id": run_id, "model": "DeiT-S", "architecture": "vit_small_patch16_224"},
        **{"setting": "a", "gamma": 0.0, "attack": "april", "dtype": "float32", "seed": 0},
        **{"trained_gamma": None, "position_embedding": "learned", "victim": "april_block"},
        **{"engine": "ours", "mode": "eval", "loss": "cross_entropy", "batch": 1, "dal": False},
        **{"checkpoint": "timm:deit_small", "checkpoint_sha": "ab" * 32, "size": 224},
        **{"mean": [0.5] * 3, "std": [0.5] * 3, "paper_row": None, "notes": [], "status": "ok"},
        **{"reason": "", "data": "imagenet-sample-600.zip", "data_is_papers": False},
        **{"labels": "Labels come from labels.csv.", "true_labels": True},
    }
    return entry | changes


def intact(run_id: str, **changes: Any) -> dict[str, Any]:
    """A cell whose attack meets the model that a client trains: `intact("masked_span")`."""
    return cell(run_id, **{"attack": run_id, "victim": "intact", **changes})


def image_row(
    image_id: str,
    psnr: float | str,
    *,
    reason: str = "so it is",
    group: str | None = None,
    diagnostics: Mapping[str, float] | None = None,
    top1: Mapping[str, float] | None = None,
    **others: float,
) -> dict[str, Any]:
    """One image's row; its scores follow from its PSNR, the paper's variant lies 1 % off. In place
    of a PSNR stands the status of an image without scores, which has a reason.

    `others` replaces scores by name.
    """
    lost = isinstance(psnr, str)
    known = {"status": psnr if lost else "ok", "reason": reason if lost else "", "group": group}
    mse = 10 ** (-0.0 if isinstance(psnr, str) else -psnr / 10)
    scores = {"mse": mse, "psnr": psnr, "ssim": 1 - mse, "fft2d": mse / 7, "lpips": mse**0.5}
    scores |= others
    values = {f"{name}.standard": math.nan if lost else value for name, value in scores.items()}
    values |= {f"{name}.paper": math.nan if lost else 0.99 * v for name, v in scores.items()}
    values |= {f"{n}.diagnostic": v for n, v in (diagnostics or {}).items() if not lost}
    values |= {f"top1.{which}": value for which, value in (top1 or {}).items()}
    fixed = {"image_id": image_id, "label_source": "labels.csv", "code": None}
    return fixed | known | values


def write_rows(
    store: RunStore, entry: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """In blocks of a few images, as a run does."""
    table = pd.DataFrame(rows).assign(run_id=entry["run_id"])
    about = {"cell": dict(entry), "made_with": {"device": "cpu"}}
    for block, start in enumerate(range(0, len(table), BLOCK)):
        store.write(entry["run_id"], block, table[start : start + BLOCK], about=about)


def add_pictures(
    store: RunStore, run_id: str, tensors: Mapping[str, torch.Tensor], ids: Sequence[str]
) -> None:
    """Store pictures of these images, which have rows, in the order of the tensors."""
    rows = store.read(run_id).drop(columns="has_picture", errors="ignore")
    about = store.about(run_id)[-1]
    for block, part in rows.groupby("block"):
        store.write(run_id, int(str(block)), part, by_image(ids, tensors), about)


def photograph(index: int, side: int = 32) -> torch.Tensor:
    """(3, side, side), every index another."""
    generator = torch.Generator().manual_seed(index)
    coarse = torch.rand(1, 3, 4, 4, generator=generator)
    return torch.nn.functional.interpolate(coarse, side, mode="bicubic")[0].clamp(0, 1)


def shuffled(image: torch.Tensor, patch: int = 8) -> torch.Tensor:
    """The image with the patches of its upper half in reverse order."""
    side, half = image.shape[-1], image.shape[-2] // 2
    patches = image[:, :half].unfold(1, patch, patch).unfold(2, patch, patch)
    flat = patches.reshape(3, -1, patch, patch).flip(1).reshape(patches.shape)
    upper = flat.permute(0, 1, 3, 2, 4).reshape(3, half, side)
    return torch.cat([upper, image[:, half:]], dim=1)


def write_pictures(store: RunStore, entry: Mapping[str, Any], psnr: Mapping[str, float]) -> None:
    """Reconstructions with noise of the PSNR that the rows say."""
    ids = list(psnr)
    plain = torch.stack([photograph(index) for index in range(len(ids))])
    fed = plain if entry["setting"] == "a" else torch.stack([shuffled(image) for image in plain])
    target = fed if entry["setting"] == "b" else plain
    spread = torch.tensor([10 ** (-value / 20) for value in psnr.values()], dtype=torch.float32)
    noise = torch.randn(plain.shape, generator=torch.Generator().manual_seed(0))
    images = (fed + noise * spread[:, None, None, None]).clamp(0, 1)
    tensors = {"images": images, "target": target, "plain": plain, "input": fed}
    add_pictures(store, entry["run_id"], tensors, ids)


def image_id(index: int) -> str:
    return f"n{index:08d}/photo {index}.JPEG"


def simple_line(
    store: RunStore,
    entry: Mapping[str, Any],
    psnr: Sequence[float | str],
    photographs: int | None = None,
    **diagnostics: float | Sequence[float],
) -> None:
    """Rows of one line: PSNR or a status by image; diagnostics by image, or one for all. `top1` is
    whether the model is right."""
    rows = []
    for i, value in enumerate(psnr):
        group = None if photographs is None else f"photograph {i % photographs}"
        own = {n: v[i] if isinstance(v, Sequence) else v for n, v in diagnostics.items()}
        top1 = {"intact": own.pop("top1")} if "top1" in own else None
        rows.append(image_row(image_id(i), value, group=group, diagnostics=own, top1=top1))
    write_rows(store, entry, rows)


PSNR: dict[str, list[float | str]] = {
    "april": [9.0, 8.5, 7.25, 4.0],
    "pixel_lattice": [math.inf, 24.5, 100.5, 21.0],
    "multi_round": [math.inf, 101.0, 102.0, 98.0],
    "grey": [12.5, 11.0, 13.0, 10.0],
    "masked_span": ["failed", "failed", "unscored", "failed"],
    "double": [math.inf, 26.0, 101.0, 20.0],
    "plain": [math.inf, 103.0, 101.0, 102.0],
}
"""Of the made-up run by line, in the order of their numbers: PSNR of each of four images."""


def synthetic_run(folder: Path, count: int = 4, **changes: Any) -> RunStore:
    """A run whose report has every part: attacks on an MJP client, a control, a failed line, a
    float64 twin and a plain client; `count` images, of which those beyond four repeat."""
    store, mjp = RunStore(folder), {"setting": "c", "gamma": 0.27}
    cells = {
        "april": cell("april", **mjp),
        "pixel_lattice": intact("pixel_lattice", **mjp),
        "multi_round": intact("multi_round", uploads=6, **mjp),
        "grey": intact("grey", role="floor", **mjp),
        "masked_span": intact("masked_span", **mjp),
        "double": intact("double", attack="pixel_lattice", dtype="float64", **mjp),
        "plain": intact("plain", attack="patch_gradient"),
    }
    store.write_cells([entry | changes for entry in cells.values()])
    for name, entry in cells.items():
        known = {} if name == "grey" else {"zero_rows": 50.0 * bool(entry["gamma"])}
        psnr = [PSNR[name][i % 4] for i in range(count)]
        simple_line(store, entry | changes, psnr, **known)
        if name not in ("grey", "masked_span"):
            stored = {image_id(i): float(value) for i, value in enumerate(psnr)}
            write_pictures(store, entry | changes, stored)
    masks = torch.arange(16).expand(count, 16) % 4 == 0
    made = torch.stack([photograph(i) for i in range(count)])
    fed = torch.stack([shuffled(image) for image in made])
    tensors = {"images": made * 0.9, "plain": made, "input": fed, "target": made, "mask": masks}
    add_pictures(store, "april", tensors, [image_id(i) for i in range(count)])
    return store


# runs of several lines ----------------------------------------------------------------------------


def run_of(folder: Path, *lines: tuple[Any, ...], photographs: int | None = None) -> Path:
    """A run of these lines, each a cell, PSNR or status by image, and diagnostics.

    photographs: from which the images are cut in turn; None: each is one of its own
    """
    store = RunStore(folder)
    store.write_cells([entry for entry, *_ in lines])
    for entry, psnr, *diagnostics in lines:
        simple_line(store, entry, psnr, photographs, **dict(*diagnostics))
    return folder


def unscored_run(
    folder: Path, attacks: Mapping[str, Mapping[str, Sequence[float]]], **facts: Any
) -> Path:
    """Attacks whose pictures nobody could score, with diagnostics by attack and image; one that is
    not a number is not stored, and an attack without diagnostics has no image."""
    store = RunStore(folder)
    altered = {"april": {"victim": "april_block"}}
    entries = {name: intact(name, **altered.get(name, {}), **facts) for name in attacks}
    store.write_cells(list(entries.values()))
    for name, diagnostics in attacks.items():
        ids = [image_id(i) for i in range(max(map(len, diagnostics.values()), default=0))]
        rows = [image_row(image, "unscored", reason="no truth") for image in ids]
        for i, row in enumerate(rows):
            row |= {f"{metric}.diagnostic": values[i] for metric, values in diagnostics.items()}
        write_rows(store, entries[name], rows)
        if ids:
            add_pictures(store, name, {"images": torch.rand(len(ids), 3, 8, 8)}, ids)
    return folder


def rows_of(line: Line) -> pd.DataFrame:
    """A row for each image, metric and variant, with the facts of the cell."""
    return long_rows(line.stored.drop(list(line.unreadable)), line.cell.columns)


def lines_of(folder: Path) -> list[Line]:
    return list(load_runs([folder]).lines)


def derived_of(folder: Path) -> dict[str, DerivedLine]:
    derived = derived_lines(clients_of(lines_of(folder)))
    return {line.attack: line for line in derived}


# reports ------------------------------------------------------------------------------------------


def small_run(folder: Path, psnr: Sequence[float] = (10.0, 12.0, 14.0), **changes: Any) -> Path:
    """A run of one small line."""
    return run_of(folder, (cell("small", **changes), psnr))


def only_line(folder: Path) -> Line:
    (line,) = load_runs([folder]).lines
    return line


APPROVED = Path(__file__).resolve().parents[1] / "report" / "approved"


LONG = re.compile(r"\d+\.\d{9,}(e-\d+)?")
"""A number at full precision, whose last digits SciPy's versions change."""


def approved(name: str, text: str) -> None:
    """Fail where the text is not the approved one, to nine digits of its numbers. One that is meant
    to differ: MJP_APPROVE=1, and look at the difference."""
    file = APPROVED / name
    if os.environ.get("MJP_APPROVE"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    got, known = (
        LONG.sub(lambda number: f"{float(number[0]):.9g}", each)
        for each in (text, file.read_text(encoding="utf-8"))
    )
    assert got == known
