"""Seconds per image, by attack and stage, as measured during the runs."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from mjp_privacy.report.loading import Line
from mjp_privacy.report.tables.text import TextTable

STAGES = ("decode", "gradient", "attack", "score")

CAPTION = (
    "Wall-clock seconds per image on the machine that ran each stage, with one thread, median over "
    "blocks of images; the times of these stages are not among the scores. The time of a gradient "
    "that several attacks share is counted for the first of them. Another machine gives other "
    "figures, so compare only lines with the same device."
)


def timing_table(lines: Sequence[Line], timings: pd.DataFrame) -> TextTable | None:
    """Medians over the blocks of each attack and dtype; None where nothing was timed."""
    timed = timings[timings["images"] > 0] if len(timings) else timings
    if timed.empty:
        return None
    cells = {line.number: line.cell for line in lines}
    timed = timed[timed["line"].isin(cells)]
    order = {stage: place for place, stage in enumerate(STAGES)}
    timed = timed.assign(
        attack=timed["line"].map({n: cell.attack.title for n, cell in cells.items()}),
        dtype=timed["line"].map({n: cell.dtype for n, cell in cells.items()}),
        order=timed["stage"].map(order).fillna(len(order)),
    )
    keys = ["attack", "dtype", "device", "order", "stage"]
    stages = timed.groupby(keys, dropna=False).agg({"images": "sum", "seconds": "median"})
    rows = tuple(
        (
            *(str(row[key]) for key in ("attack", "dtype", "stage", "device", "images")),
            f"{row['seconds']:.3g}",
        )
        for row in stages.reset_index().to_dict("records")
    )
    header = ("Attack", "dtype", "Stage", "Device", "Images", "s / image")
    return TextTable("Time", CAPTION, header, rows, "llllrr")
