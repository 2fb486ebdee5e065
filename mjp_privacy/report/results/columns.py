"""What a published file keeps of each line and image, and the rows of a run made from it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from mjp_privacy.experiment.cell_facts import CommandFacts, columns_of
from mjp_privacy.report.cell_columns import CLIENT_FACTS, client_text
from mjp_privacy.report.lines import Line
from mjp_privacy.report.rows import UNREADABLE, CellScores

SCORES: Mapping[str, tuple[str, str]] = {
    "psnr": ("psnr", "standard"),
    "psnr_paper": ("psnr", "paper"),  # inf: equal in every 8-bit value
    "ssim": ("ssim", "standard"),
    "lpips": ("lpips", "standard"),
    "mse": ("mse", "standard"),
}
"""Scores of every published row: column -> (metric, variant)."""

PAPER_SCORES: Mapping[str, tuple[str, str]] = {
    f"{metric}_paper": (metric, "paper") for metric in ("mse", "fft2d", "ssim", "lpips")
}
"""The other scores as the paper defines them: kept where a table stands beside the paper's."""

DIAGNOSTICS: Mapping[str, tuple[str, str]] = {
    **{
        name: (name, "diagnostic")
        for name in (
            *("gradient_residual", "zero_rows"),  # what derived lines are chosen by
            *("grey_psnr", "ceiling_psnr", "always_masked", "empty_mask", "cond_a"),
        )
    },
    **{"top1": ("top1", "intact"), "top1_altered": ("top1", "altered")},
}
"""What stands beside a score; an image may lack it."""

REPEATS = "repeated_patches"
"""Column: how many patches of the picture equal another of its patches in all 8-bit values."""

LINE_COLUMNS = ("run", "model", "setting", "gamma", "client", "dtype", "seed", "attack", "role")
PLAIN_CLIENT = {"mode": "eval", "loss": "cross_entropy", "batch": 1}


def line_rows(line: Line, *, paper_scores: bool = False) -> pd.DataFrame:
    """One row for each image of a line: its scores, diagnostics, status and reason."""
    images = line.store.read(line.run_id, ["image_id", "group", "status", "reason"])
    images = images[images["status"] != UNREADABLE]
    names = images["image_id"].astype(str)
    columns: dict[str, Any] = {
        "line": np.int16(line.number),
        **{name: _of_line(line, name) for name in LINE_COLUMNS},
        "uploads": np.int16(line.uploads),
        "image_id": names.to_numpy(),
        "group": images["group"].to_numpy(),
    }
    wanted = {**SCORES, **(PAPER_SCORES if paper_scores else {}), **DIAGNOSTICS}
    for name, (metric, variant) in wanted.items():
        values = line.scored(metric, variant).reindex(names)
        columns[name] = values.to_numpy(dtype=np.float32)
    for name in ("status", "reason"):
        columns[name] = images[name].fillna("").to_numpy()
    return pd.DataFrame(columns).reset_index(drop=True)


def _of_line(line: Line, name: str) -> Any:
    if name == "client":
        return published_client(line)
    if name == "gamma":
        return np.float32(line.cell.gamma)
    return {"run": line.run, "role": line.role, "attack": line.attack}.get(
        name, line.cell.columns.get(name)
    )


def published_client(line: Line) -> str:
    """What this client does that a plain one does not, such as `plain share 0.5`, or `–`."""
    columns = line.cell.columns
    keys = [key for key in CLIENT_FACTS if columns.get(key) != PLAIN_CLIENT.get(key, object())]
    return client_text(columns, keys)


def cells(lines: Sequence[Line], source: str | None) -> dict[str, Any]:
    """The cells' facts: those that all share once, then each line's own.

    What the command's folders were called is left out; `source` says what the pictures are.
    """
    dropped = {*columns_of(CommandFacts)} - {"data_is_papers", "true_labels"}
    cells = [
        {name: fact for name, fact in line.cell.columns.items() if name not in dropped}
        for line in lines
    ]
    for cell in cells if source else ():
        cell["data"] = source
    return without_repetition(
        [
            {"number": line.number, "run": line.run, "cell": cell}
            for line, cell in zip(lines, cells, strict=True)
        ]
    )


def without_repetition(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts that the cells of all lines share once, then each line with its cell's own."""
    cells = [line["cell"] for line in lines]
    shared = {
        name: fact
        for name, fact in cells[0].items()
        if all(name in cell and cell[name] == fact for cell in cells)
    }
    own = [{name: fact for name, fact in cell.items() if name not in shared} for cell in cells]
    entries = [{**line, "cell": cell} for line, cell in zip(lines, own, strict=True)]
    return {"shared": shared, "lines": entries}


def score_table(rows: pd.DataFrame) -> CellScores:
    """The scores of a line, from its published rows."""
    known = {**SCORES, **PAPER_SCORES, **DIAGNOSTICS}
    names = {n: f"{metric}.{variant}" for n, (metric, variant) in known.items() if n in rows}
    of_image = rows[["image_id", "group", "status", "reason"]].assign(code=None)
    scores = rows[[*names]].dropna(axis=1, how="all").rename(columns=names)
    return CellScores.of_table(pd.concat([of_image, scores], axis=1))
