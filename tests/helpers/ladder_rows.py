"""Runs of several attacks on one thing, with figures small enough to reduce by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import clients_of, derived_lines
from mjp_privacy.report.lines import Line
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.worst_case import DerivedLine
from tests.helpers.report_rows import (
    add_pictures,
    cell,
    image_id,
    image_row,
    intact,
    simple_line,
    write_rows,
)


def run_of(folder: Path, *lines: tuple[Any, ...], photographs: int | None = None) -> Path:
    """A run of these lines, each a cell, PSNR or status by image, and diagnostics of all images.

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
