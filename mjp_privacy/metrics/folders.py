"""Two folders (or zips) of image files, paired by name."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import formula_free, shown
from mjp_privacy.data.decoding import Altered, ImageError, decoded
from mjp_privacy.data.files import Files, image_names, open_files
from mjp_privacy.metrics.pictures import arrow
from mjp_privacy.metrics.scores import METRICS, Key, chosen_keys
from mjp_privacy.metrics.scores import score as scores_of
from mjp_privacy.metrics.statistics import PSNR_CAP, bootstrap_interval

SHOWN = 20  # most lines of a list in an error message


@dataclass(frozen=True)
class Pair:
    """The same image in both folders; `name` is its path inside either."""

    name: str
    reconstructions: Files
    references: Files
    altered: Altered = field(default_factory=Altered, compare=False)
    """Files that were turned, or are animations, of all pairs that were read so far."""

    def read(self) -> tuple[Tensor, Tensor]:
        """Reconstruction and reference, (1, 3, H, W) float64 in [0, 1].

        UserError where one cannot be read, or where they differ in size.
        """
        pictures = self._decoded(self.reconstructions), self._decoded(self.references)
        (width, height), (wanted_width, wanted_height) = (picture.size for picture in pictures)
        if (width, height) != (wanted_width, wanted_height):
            raise UserError(
                f"{shown(self.reconstructions.path / self.name)}: expected "
                f"{wanted_height}×{wanted_width} pixels as in "
                f"{shown(self.references.path / self.name)}, got {height}×{width}"
            )
        return _pixels(pictures[0]), _pixels(pictures[1])

    def _decoded(self, files: Files) -> Image.Image:
        where = shown(files.path / self.name)
        try:
            picture, turn, animated = decoded(files.read(self.name))
        except ImageError as error:
            raise ImageError(error.reason, where) from error
        self.altered.note(where, turn, animated)
        return picture


def pair_folders(
    reconstruction: Path, reference: Path, *, allow_missing: bool
) -> tuple[list[Pair], int]:
    """The pairs in the order of their names, and how many images have no partner.

    A missing partner is an error unless `allow_missing` is set. Nothing is decoded here.
    """
    folders = open_files(reconstruction), open_files(reference)
    left, right = (set(image_names(folder)) for folder in folders)
    missing = [str(reference / name) for name in sorted(left - right)]
    missing += [str(reconstruction / name) for name in sorted(right - left)]
    if missing and not allow_missing:
        raise UserError(
            "Expected every image in both folders under the same name, extension included. "
            f"Missing:{_listing(missing)}\nSupply or rename them, or add --allow-missing to score "
            "the rest."
        )
    altered = Altered()
    pairs = [Pair(name, *folders, altered) for name in sorted(left & right)]
    if not pairs:
        raise UserError(
            f"Expected images of the same name, extension included, in {shown(reconstruction)} and "
            f"{shown(reference)}; got {len(left)} and {len(right)} images with no name in common."
        )
    return pairs, len(missing)


def _pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(picture).transpose(2, 0, 1)[None] / 255)


def _listing(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n  ".join(["", *map(shown, lines[:SHOWN]), *more])


# ------------------------------------------------------------------------------------------------
# Scores of pairs of image files: the rows of `mjp score`, their CSV and the table of means.

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
    """Write the rows, values at full precision; no text a formula."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        for row in rows:
            value = row.value if row.status == OK else ""
            writer.writerow(
                [formula_free(row.image), *row[1:3], value, row.status, formula_free(row.reason)]
            )


@dataclass(frozen=True)
class Mean:
    """One metric over the images that have it; PSNR averages min(PSNR, 100)."""

    metric: str
    variant: str
    mean: float
    low: float  # of the 95 % interval, a bootstrap of the mean; NaN for a single image
    high: float
    n: int
    exact: int | None  # images equal to their references; of PSNR only
    better_for_privacy: str  # higher or lower


def means(rows: Sequence[Row]) -> list[Mean]:
    """Mean, interval and number of images for each metric."""
    scored = [row for row in rows if row.status == OK]
    found = []
    for key in dict.fromkeys((row.metric, row.variant) for row in scored):
        values = np.array([row.value for row in scored if (row.metric, row.variant) == key])
        exact = int(np.isinf(values).sum()) if key[0] == "psnr" else None
        values = values if exact is None else np.minimum(values, PSNR_CAP)
        low, high = bootstrap_interval(values)
        better = "lower" if METRICS["/".join(key)].higher_is_better else "higher"
        found.append(Mean(*key, float(values.mean()), low, high, len(values), exact, better))
    return found


def table(found: Sequence[Mean]) -> str:
    """The means as printed, and what the arrows mean."""
    lines = [f"{'metric':8}{'variant':10}{'mean':>10}  {'95 % interval':^23}{'n':>6}"]
    for of in found:
        direction = arrow(of.better_for_privacy == "lower")
        interval = f"[{of.low:10.5g},{of.high:10.5g}]"
        lines.append(f"{of.metric:8}{of.variant:10}{of.mean:10.5g}  {interval}{of.n:6} {direction}")
    lines.append("↑ higher, ↓ lower is better for privacy. Interval: bootstrap of the mean.")
    exact = [f"{of.exact} ({of.variant})" for of in found if of.exact is not None]
    if exact:
        lines.append(f"PSNR averages min(PSNR, {PSNR_CAP:g}). Exact images: {', '.join(exact)}.")
    return "\n".join(lines)
