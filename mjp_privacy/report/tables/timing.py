"""Seconds per image, by attack and stage, as measured during the runs."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from mjp_privacy.report.loading import Line
from mjp_privacy.report.tables.text import TextTable

STAGES = ("decode", "gradient", "attack", "score")

CAPTION = (
    "Wall-clock seconds per image on the machine that ran each stage, median over blocks of "
    "images; the times of these stages are not among the rows. The time of a gradient that "
    "several attacks share is counted for the first of them. Another machine gives other figures, "
    "so compare only lines with the same device and number of threads."
)

COLUMNS = ("run", "run_id", "stage", "seconds", "images", "device", "threads")


def timing_table(lines: Sequence[Line], timings: pd.DataFrame) -> TextTable | None:
    """Medians over the blocks of each attack and dtype; None where nothing was timed."""
    if timings.empty or any(column not in timings for column in COLUMNS):
        return None
    cells = pd.DataFrame(
        [(line.run, line.run_id, line.cell.attack.title, line.cell.dtype) for line in lines],
        columns=["run", "run_id", "attack", "dtype"],
    ).drop_duplicates()
    timed = timings[list(COLUMNS)].merge(cells, on=["run", "run_id"])
    timed["stage_order"] = [
        STAGES.index(stage) if stage in STAGES else len(STAGES) for stage in timed["stage"]
    ]
    keys = ["attack", "dtype", "device", "threads", "stage_order", "stage"]
    timed = timed[timed["images"] > 0]
    if timed.empty:
        return None
    timed["each"] = timed["seconds"] / timed["images"]
    by_stage = timed.groupby(keys, dropna=False, observed=True)
    stages = by_stage.agg({"images": "sum", "each": "median"})
    sums = stages.reset_index()
    rows = tuple(
        (
            *(str(row[key]) for key in ("attack", "dtype", "stage", "device", "threads", "images")),
            f"{row['each']:.3g}",
        )
        for row in sums.to_dict("records")
    )
    header = ("Attack", "dtype", "Stage", "Device", "Threads", "Images", "s / image")
    return TextTable("Time", CAPTION, header, rows, "llllrrr")
