"""Runs of several attacks on one thing, with figures small enough to reduce by hand."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import clients_of, derived_lines
from mjp_privacy.report.lines import Line
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.worst_case import DerivedLine
from tests.helpers.report_rows import add_pictures, cell, image_id, image_rows, intact, write_rows

LADDER = {
    "april": (10.0, "failed", 30.0, "failed"),
    "patch_gradient": (20.0, 15.0, "unsupported", "unsupported"),
    "masked_span": (20.0, 25.0, "failed", "failed"),
}
"""PSNR of four images by attack, or why there is none: the last image nobody reconstructs."""

RESIDUALS = {
    "april": (0.5, None, 0.1, None),
    "patch_gradient": (0.1, 0.2, None, None),
    "masked_span": (0.3, 0.4, None, None),
}
SSIM = {"april": 0.9, "patch_gradient": 0.2, "masked_span": 0.3}
"""Not in the order of PSNR, so that a metric taken from another attack shows."""


def ladder_run(folder: Path, *, residuals: bool = True, altered: str | None = None) -> RunStore:
    """Three attacks on one thing, in this order, between a floor and a ceiling; `altered` is one
    that needs a client with another block 0."""
    store = RunStore(folder)
    shared: dict[str, Any] = {"setting": "b", "gamma": 0.27, "victim": "intact"}
    shared["data_is_papers"] = True
    cells = {name: cell(name, attack=name, **shared) for name in LADDER}
    if altered:
        cells[altered]["victim"] = "april_block"
    cells["april"]["paper_row"] = {"model": "DeiT-S", "setting": "b"}
    controls = {"grey": "floor", "other_image": "floor", "oracle_inverse": "ceiling"}
    paper = {"model": "DeiT-S", "setting": "b"}  # controls have none; one that came is not used
    for name, role in controls.items():
        cells[name] = cell(name, attack=name, role=role, paper_row=paper, **shared)
    store.write_cells(list(cells.values()))
    for name, scores in LADDER.items():
        rows = [
            ladder_rows(cells[name], i, score, RESIDUALS[name][i] if residuals else None)
            for i, score in enumerate(scores)
        ]
        write_rows(store, cells[name], list(chain(*rows)))
    for name, psnr in (("grey", 11.0), ("other_image", 8.0), ("oracle_inverse", 99.0)):
        rows = [image_rows(cells[name], image_id(i), psnr) for i in range(4)]
        write_rows(store, cells[name], list(chain(*rows)))
    return store


def ladder_rows(
    entry: Mapping[str, Any], index: int, score: float | str, residual: float | None = None
) -> list[dict[str, Any]]:
    """Rows of one image: scored, or with the reason why not."""
    if isinstance(score, str):
        known: dict[str, Any] = {"status": score, "reason": f"{entry['attack']} says so"}
        return image_rows(entry, image_id(index), 0.0, **known)
    diagnostics = {"grey_psnr": 11.0, "ceiling_psnr": 40.0, "cond_a": 1e3, "shuffled_patches": 7.0}
    diagnostics |= {} if residual is None else {"gradient_residual": residual}
    top1 = {"intact": float(index % 2), "altered": 0.0}
    known = {"diagnostics": diagnostics, "top1": top1, "ssim": SSIM.get(entry["attack"], 0.5)}
    return image_rows(entry, image_id(index), score, **known)


def run_of(folder: Path, *lines: tuple[Any, ...], photographs: int | None = None) -> Path:
    """A run of these lines, each a cell, PSNR or status by image, and diagnostics of all images.

    photographs: from which the images are cut in turn; None: each is one of its own
    """
    store = RunStore(folder)
    store.write_cells([entry for entry, *_ in lines])
    for entry, psnr, *diagnostics in lines:
        simple_line(store, entry, psnr, photographs, **dict(*diagnostics))
    return folder


def simple_line(
    store: RunStore,
    entry: Mapping[str, Any],
    psnr: Sequence[float | str],
    photographs: int | None = None,
    **diagnostics: float,
) -> None:
    """Rows of one line: PSNR or a status by image, and diagnostics equal for all of them."""
    rows: list[dict[str, Any]] = []
    for i, value in enumerate(psnr):
        if isinstance(value, str):
            made = image_rows(entry, image_id(i), 0.0, status=value, reason="so it is")
        else:
            made = image_rows(entry, image_id(i), value, diagnostics=diagnostics)
        group = {} if photographs is None else {"group": f"photograph {i % photographs}"}
        rows += [row | group for row in made]
    write_rows(store, entry, rows)


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
        rows = []
        for i, image in enumerate(ids):
            lost = image_rows(entries[name], image, 0.0, status="unscored", reason="no truth")
            for metric, values in diagnostics.items():
                known = {"metric": metric, "variant": "diagnostic", "value": values[i]}
                lost += [lost[0] | known] if not math.isnan(values[i]) else []
            rows += lost
        write_rows(store, entries[name], rows)
        if ids:
            add_pictures(store, name, {"images": torch.rand(len(ids), 3, 8, 8)}, ids)
    return folder


def curve_run(folder: Path, gammas: Sequence[float] = (0.09, 0.27)) -> RunStore:
    """multi_round with 1, 2 and 4 uploads at each γ, and an attack that has one only."""
    store = RunStore(folder)
    cells: list[dict[str, Any]] = []
    for gamma in gammas:
        shared: dict[str, Any] = {"setting": "c", "gamma": gamma, "victim": "intact"}
        cells.append(cell(f"span {gamma}", attack="masked_span", uploads=1, **shared))
        for uploads in (1, 2, 4):
            known = {"attack": f"multi_round R={uploads}", "attack_name": "multi_round"}
            known |= {"uploads": uploads, "attack_options": f'{{"uploads": {uploads}}}'}
            cells.append(cell(f"{uploads} {gamma}", **known, **shared))
    store.write_cells(cells)
    for entry in cells:
        level = 60.0 * (entry["uploads"] - 1) + 12.0 / (1 + entry["gamma"])
        psnr = [level + i for i in range(5)]
        simple_line(store, entry, psnr, grey_psnr=11.0, ceiling_psnr=40.0)
    return store


def lines_of(folder: Path) -> list[Line]:
    return list(load_runs([folder]).lines)


def derived_of(folder: Path) -> dict[str, DerivedLine]:
    derived = derived_lines(clients_of(lines_of(folder)))
    return {line.attack: line for line in derived}
