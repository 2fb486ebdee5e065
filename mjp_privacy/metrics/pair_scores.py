"""Scores of pairs of image files: the rows of `mjp score`, their CSV and the table of means."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.metrics.contract import arrow
from mjp_privacy.metrics.folders import Pair
from mjp_privacy.metrics.references import Key
from mjp_privacy.metrics.scores import METRICS, chosen_keys
from mjp_privacy.metrics.scores import score as scores_of
from mjp_privacy.metrics.spreadsheet import formula_free
from mjp_privacy.metrics.statistics import PSNR_CAP, bootstrap_interval

OK, FAILED = "ok", "failed"


class Row(NamedTuple):
    """One line of the CSV; of a pair that cannot be scored the value is empty."""

    image: str
    metric: str
    variant: str
    value: float
    status: str = OK
    reason: str = ""


def score_pairs(pairs: Sequence[Pair], metrics: Sequence[str], device: str) -> list[Row]:
    """A row for every pair and metric, also for those that cannot be scored, with the reason.

    UserError if none can be.
    """
    keys = chosen_keys(metrics)
    rows: list[Row] = []
    console = Console(stderr=True)
    for pair in track(pairs, "Scoring", console=console, disable=not console.is_terminal):
        rows += _rows(pair, keys, device)
    if all(row.status == FAILED for row in rows):
        raise UserError(
            f"None of the {len(pairs)} pairs can be scored; the first is {shown(rows[0].image)}: "
            f"{rows[0].reason}. Expected pairs of readable images of the same size."
        )
    return rows


def _rows(pair: Pair, keys: Sequence[Key], device: str) -> list[Row]:
    try:
        images = pair.read()
    except (UserError, MemoryError) as error:
        return [_failed(pair, key, error) for key in keys]
    names = ["/".join(key) for key in keys]
    try:
        scores = scores_of(*images, metrics=names, device=device)
        return [Row(pair.name, *key, float(scores[key][0])) for key in keys]
    except (UserError, MemoryError):  # of one metric: pictures too small for it
        return [_row(pair, images, key, device) for key in keys]


def _row(pair: Pair, images: tuple[Tensor, Tensor], key: Key, device: str) -> Row:
    try:
        scores = scores_of(*images, metrics=[key], device=device)
    except (UserError, MemoryError) as error:
        return _failed(pair, key, error)
    return Row(pair.name, *key, float(scores[key][0]))


def _failed(pair: Pair, key: Key, error: Exception) -> Row:
    reason = str(error) or "needs more memory than there is"
    return Row(pair.name, *key, math.nan, FAILED, reason)


def failures(rows: Sequence[Row]) -> dict[str, str]:
    """The reason by image, of images without one score or more."""
    return {row.image: row.reason for row in reversed(rows) if row.status == FAILED}


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, values at full precision; texts as `core.spreadsheet` says."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        for row in rows:
            value = row.value if row.status == OK else ""
            writer.writerow(
                [formula_free(row.image), *row[1:3], value, row.status, formula_free(row.reason)]
            )


def table(rows: Sequence[Row]) -> str:
    """Mean, interval and number of images for each metric, and what the arrows mean."""
    lines = [f"{'metric':8}{'variant':10}{'mean':>10}  {'95 % interval':^23}{'n':>6}"]
    exact = []
    scored = [row for row in rows if row.status == OK]
    for key in dict.fromkeys((row.metric, row.variant) for row in scored):
        values = np.array([row.value for row in scored if (row.metric, row.variant) == key])
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
