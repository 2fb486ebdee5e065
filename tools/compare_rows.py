"""Rows of several runs of one config, compared row by row: how far are equal scores apart?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

KEY = [
    "model",
    "setting",
    "gamma",
    "attack_name",
    "dtype",
    "victim",
    "image_id",
    "metric",
    "variant",
]
SCORES = ("mse", "psnr", "ssim", "fft2d", "lpips")
STATED = ("status", "reason")
"""What must be the same in every row."""


def rows_of(path: Path) -> pd.DataFrame:
    """The rows of a run by their key, in the key's order."""
    rows = pd.read_parquet(path)
    rows["value"] = rows["value"].astype(float)
    return rows.set_index(KEY).sort_index()


def apart(first: pd.DataFrame, second: pd.DataFrame) -> pd.Series:
    """|a - b| / max(1, |a|) of each row; 0 where both are NaN or the same infinity, else inf."""
    a, b = (rows["value"].to_numpy() for rows in (first, second))
    with np.errstate(invalid="ignore"):
        distance = np.abs(a - b) / np.maximum(1.0, np.abs(a))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    distance = np.where(same, 0.0, np.where(np.isfinite(distance), distance, np.inf))
    return pd.Series(distance, index=first.index)


def comparison(folder: Path) -> Iterator[str]:
    """A table in Markdown: the runs of a folder beside its standard one. By precision of the
    client's gradient: the largest distance of a score, the largest one of PSNR in dB, and the
    median one of PSNR; last the largest distance of a row that is no score."""
    files = sorted(folder.glob("*.parquet"))
    standard = next(file for file in files if file.stem.endswith("torch2.11.0+0.26.0_plain"))
    first = rows_of(standard)
    yield f"{len(first):,} rows beside those of {standard.stem}"
    heads = ("run", "rows", "other status", "same bits", "float64", "dB", "median")
    yield "| " + " | ".join((*heads, "float32", "dB", "median", "other rows")) + " |"
    yield "| --- |" + " ---: |" * 10
    for file in files:
        if file != standard:
            yield _line(file.stem, first, rows_of(file))


def _line(name: str, first: pd.DataFrame, second: pd.DataFrame) -> str:
    if not first.index.equals(second.index):
        missing = len(first.index.symmetric_difference(second.index))
        return (
            f"| {name} | {len(second):,} | {missing} rows stand in one of both alone |" + " |" * 8
        )
    other = int(
        (first[list(STATED)].fillna("") != second[list(STATED)].fillna("")).any(axis=1).sum()
    )
    distance = apart(first, second)
    cells = [f"{len(second):,}", str(other), f"{100 * (distance == 0).mean():.1f} %"]
    metric = distance.index.get_level_values("metric")
    score = metric.isin(SCORES)
    decibels = np.abs(first["value"] - second["value"])
    for dtype in ("float64", "float32"):
        these = score & (distance.index.get_level_values("dtype") == dtype)
        psnr = decibels[these & (metric == "psnr")]
        cells += [f"{distance[these].max():.1e}", f"{psnr.max():.1e}", f"{psnr.median():.1e}"]
    cells.append(f"{distance[~score].max():.1e}" if (~score).any() else "")
    return f"| {name} | " + " | ".join(cells) + " |"
