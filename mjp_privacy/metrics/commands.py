"""`mjp score`: compares a folder of reconstructions with a folder of references.

Images are paired by their path inside the folders, extension included. The CSV holds one row per
image, metric and variant, at full precision; the printed table shows means over the images.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from mjp_privacy.core.command import DONE, Usage
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.metrics import METRICS, lpips_backbone
from mjp_privacy.metrics import score as scores_of
from mjp_privacy.metrics.contract import arrow
from mjp_privacy.metrics.folders import Pair, pair_folders
from mjp_privacy.metrics.statistics import PSNR_CAP, bootstrap_interval


@dataclass(frozen=True)
class ScoreArguments:
    """Score a folder of reconstructions against a folder of references."""

    reference: Path
    """Folder of the private images."""
    reconstruction: Path
    """Folder of the reconstructions, with the same file names."""
    out: Path
    """The CSV to write: image, metric, variant, value."""
    metrics: tuple[str, ...] = ()
    """What to compute, such as psnr or ssim/paper; everything if left out."""
    allow_missing: bool = False
    """Score the images that are in both folders, and only count the others."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes the GPU if there is one."""


class Row(NamedTuple):
    """One line of the CSV."""

    image: str
    metric: str
    variant: str
    value: float


def score(argv: list[str], usage: Usage) -> int:
    """Score the pairs of two folders, write the CSV and print the means."""
    arguments = usage.parse(ScoreArguments, argv)
    out, device = arguments.out, arguments.device
    if out.is_dir():
        raise UserError(f"Expected a file for --out, got the folder {out}. Give {out}/scores.csv.")
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    pairs, missing = pair_folders(
        arguments.reconstruction, arguments.reference, allow_missing=arguments.allow_missing
    )
    rows = _score_pairs(pairs, arguments.metrics or METRICS.names(), place)
    try:
        write_atomically(out, lambda temporary: _write_csv(temporary, rows))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error}). Give another --out.") from error
    print(_table(rows))
    if any(row.metric == "lpips" for row in rows):
        print(f"LPIPS backbone: {lpips_backbone()}.")
    if arguments.allow_missing:
        print(f"Images without a partner, not scored: {missing}.")
    print(f"{len(rows)} rows in {out}")
    return DONE


def _score_pairs(pairs: Sequence[Pair], metrics: Sequence[str], device: str) -> list[Row]:
    rows = []
    console = Console(stderr=True)
    for pair in track(pairs, "Scoring", console=console, disable=not console.is_terminal):
        try:
            scores = scores_of(*pair.read(), metrics=metrics, device=device)
        except UserError as error:
            raise UserError(f"{pair.name}: {error}") from error
        rows += [Row(pair.name, *key, float(values[0])) for key, values in scores.items()]
    return rows


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)


def _table(rows: Sequence[Row]) -> str:
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
