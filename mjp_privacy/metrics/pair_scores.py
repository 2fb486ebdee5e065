"""Scores of pairs of image files: the rows of `mjp score`, their CSV and the table of means."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.contract import arrow
from mjp_privacy.metrics.folders import Pair
from mjp_privacy.metrics.scores import METRICS
from mjp_privacy.metrics.scores import score as scores_of
from mjp_privacy.metrics.statistics import PSNR_CAP, bootstrap_interval


class Row(NamedTuple):
    """One line of the CSV."""

    image: str
    metric: str
    variant: str
    value: float


def score_pairs(pairs: Sequence[Pair], metrics: Sequence[str], device: str) -> list[Row]:
    """A row for every pair and metric."""
    rows = []
    console = Console(stderr=True)
    for pair in track(pairs, "Scoring", console=console, disable=not console.is_terminal):
        try:
            scores = scores_of(*pair.read(), metrics=metrics, device=device)
        except UserError as error:
            raise UserError(f"{pair.name}: {error}") from error
        rows += [Row(pair.name, *key, float(values[0])) for key, values in scores.items()]
    return rows


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, values at full precision."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)


def table(rows: Sequence[Row]) -> str:
    """Mean, interval and number of images for each metric, and what the arrows mean."""
    lines = [f"{'metric':8}{'variant':10}{'mean':>10}  {'95 % interval':^23}{'n':>6}"]
    exact = []
    for key in dict.fromkeys((row.metric, row.variant) for row in rows):
        values = np.array([row.value for row in rows if (row.metric, row.variant) == key])
        if key[0] == "psnr":
            exact.append(f"{np.isinf(values).sum()} ({key[1]})")
            values = np.minimum(values, PSNR_CAP)
        low, high = bootstrap_interval(values)  # NaN for a single image
        direction = arrow(METRICS["/".join(key)].higher_is_better)
        interval = f"[{low:10.5g},{high:10.5g}]"
        name, variant = key
        lines.append(
            f"{name:8}{variant:10}{values.mean():10.5g}  {interval}{len(values):6} {direction}"
        )
    lines.append("↑ higher, ↓ lower is better for privacy. Interval: bootstrap of the mean.")
    if exact:
        lines.append(f"PSNR averages min(PSNR, {PSNR_CAP:g}). Exact images: {', '.join(exact)}.")
    return "\n".join(lines)
