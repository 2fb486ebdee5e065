"""Seconds per image, by stage and attack, as this machine took them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from mjp_privacy.report.loading import Line
from mjp_privacy.report.views import TextTable

STAGES = ("decode", "gradient", "attack", "score")

CAPTION = (
    "Wall-clock seconds an image of the machine that ran each stage, median over blocks; not part "
    "of the rows. A gradient that two attacks share is booked on the first. Another machine gives "
    "other figures, so compare within one device and thread count only."
)

COLUMNS = ("run", "run_id", "stage", "seconds", "images", "device", "threads")


def timing_table(lines: Sequence[Line], timings: pd.DataFrame) -> TextTable | None:
    """Medians over the blocks of one attack and dtype; None where nothing was timed."""
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
    stages = timed.groupby(keys, dropna=False).agg({"images": "sum", "each": "median"})
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
