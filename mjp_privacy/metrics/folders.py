"""Two folders (or zips) of image files, paired by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.data.decoding import Altered, ImageError, decoded
from mjp_privacy.data.files import Files, image_names, open_files
from mjp_privacy.metrics.pictures import arrow
from mjp_privacy.metrics.scores import METRICS, Key, chosen_metrics
from mjp_privacy.metrics.scores import score as scores_of
from mjp_privacy.metrics.statistics import PSNR_CAP, summarise

SHOWN = 10  # most names of a list in an error message


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
        got, wanted = (f"{picture.height}×{picture.width}" for picture in pictures)
        if got != wanted:
            raise ImageError(
                f"expected {wanted} pixels as in {shown(self.references.path / self.name)}, got "
                f"{got}",
                shown(self.reconstructions.path / self.name),
            )
        left, right = (
            torch.from_numpy(np.asarray(picture).transpose(2, 0, 1)[None] / 255)
            for picture in pictures
        )
        return left, right

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
            f"Missing: {first_of([*map(shown, missing)], SHOWN)}. Supply or rename them, or add "
            "--allow-missing to score the rest."
        )
    altered = Altered()
    pairs = [Pair(name, *folders, altered) for name in sorted(left & right)]
    if not pairs:
        raise UserError(
            f"Expected images of the same name, extension included, in {shown(reconstruction)} and "
            f"{shown(reference)}; got {len(left)} and {len(right)} images with no name in common."
        )
    return pairs, len(missing)


# ------------------------------------------------------------------------------------------------
# Scores of pairs of image files: the rows of `mjp score`, their CSV and the table of means.

OK, FAILED = "ok", "failed"
COLUMNS = ("image", "metric", "variant", "value", "status", "reason")
Row = tuple[str, str, str, float, str, str]


def score_pairs(
    pairs: Sequence[Pair], metrics: Sequence[str], device: torch.device
) -> pd.DataFrame:
    """A row for every pair and metric, also for those that cannot be scored, with the reason.

    UserError if none can be.
    """
    keys = list(chosen_metrics(metrics))
    console = Console(stderr=True)
    followed = track(pairs, "Scoring", console=console, disable=not console.is_terminal)
    found = [row for pair in followed for row in _scored(pair, keys, device)]
    rows = pd.DataFrame(found, columns=list(COLUMNS))
    if (rows["status"] == FAILED).all():
        raise UserError(
            f"None of the {len(pairs)} pairs can be scored; the first is "
            f"{shown(rows['image'][0])}: {rows['reason'][0]}. Expected pairs of readable images of "
            "the same size."
        )
    return rows


def _scored(pair: Pair, keys: Sequence[Key], device: torch.device) -> list[Row]:
    try:
        scores = scores_of(*pair.read(), metrics=keys, device=device)
        return [(pair.name, *key, float(scores[key][0]), OK, "") for key in keys]
    except (UserError, MemoryError) as error:
        if len(keys) > 1 and not isinstance(error, ImageError):  # pictures too small for a metric
            return [row for key in keys for row in _scored(pair, [key], device)]
        reason = str(error) or "needs more memory than there is"
        return [(pair.name, *key, math.nan, FAILED, reason) for key in keys]


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


def means(rows: pd.DataFrame) -> list[Mean]:
    """Mean, interval and number of images for each metric."""
    scored, found = rows[rows["status"] == OK], []
    for (metric, variant), own in scored.groupby(["metric", "variant"], sort=False):
        is_psnr = metric == "psnr"
        cap = PSNR_CAP if is_psnr else math.inf
        figures = summarise(own["value"].to_numpy(np.float64), own["status"].tolist(), cap=cap)
        better = "lower" if METRICS[f"{metric}/{variant}"].higher_is_better else "higher"
        ends, exact = (figures.low, figures.high), figures.exact if is_psnr else None
        found.append(Mean(metric, variant, figures.mean, *ends, figures.n, exact, better))
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
