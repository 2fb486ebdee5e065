"""The figures that published sentences and tables name, by their names.

LineFigures(line).figure("exact"), LineFigures(line).figure("share20")
# 116, "188 of 200 (94 %, 90–97)"
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.shares import Share
from mjp_privacy.metrics.statistics import PSNR_CAP, Summary
from mjp_privacy.report.lines import Line, share_of_tried, success_share, summary
from mjp_privacy.report.results.columns import published_client
from mjp_privacy.report.results.seed_spread import SeedSpread

NAMES = (
    *("n", "of", "exact", "mean", "average", "low", "high", "median", "worst", "quartiles"),
    *("grey", "always_masked", "accuracy"),
)
"""Figures of a line, besides share_exact, shareN, fromN (N in dB), paper_METRIC and
paper_average, the mean PSNR as the paper defines it."""


@dataclass(frozen=True)
class LineFigures:
    """Figures of one line. `exact` has one meaning: equal in every 8-bit value."""

    line: Line

    @property
    def n(self) -> int:
        """Images with a score."""
        return self._psnr.counts.ok

    @property
    def of(self) -> int:
        """Images the attacker was given; those it has no reconstruction of count, as missed."""
        counts = self._psnr.counts
        return counts.ok + counts.failed + counts.unsupported

    @property
    def exact(self) -> int:
        """Images equal to the truth in every 8-bit value: their PSNR in the paper's variant, which
        compares 8-bit values, is infinite."""
        return int(np.isposinf(self.line.scored("psnr", "paper")).sum())

    @property
    def mean(self) -> str:
        """Mean of min(PSNR, 100) with its interval, and its n where some images have no score."""
        if not self.n:
            return "–"
        of_n = "" if self.n == self.of else f" (over {self.n})"
        if self.low == self.high == PSNR_CAP:
            return f"100, the cap{of_n}"
        interval = "–" if math.isnan(self.low) else f"{self.low:.1f}, {self.high:.1f}"
        return f"{self.average:.1f} [{interval}]{of_n}"

    @property
    def average(self) -> float:
        """Mean of min(PSNR, 100)."""
        return self._psnr.mean

    @property
    def low(self) -> float:
        """Lower end of the mean's 95 % bootstrap interval."""
        return self._psnr.low

    @property
    def high(self) -> float:
        """Upper end of the mean's 95 % bootstrap interval."""
        return self._psnr.high

    @property
    def median(self) -> float:
        """Median PSNR; infinite where over half of the images equal the truth in every float."""
        return self.quantile(0.5)

    @property
    def worst(self) -> float:
        """The smallest PSNR of an image."""
        return self.quantile(0.0)

    @property
    def quartiles(self) -> str:
        """The 25 and 75 % quantiles: `17.7–∞`."""
        if not self.n:
            return "–"
        return f"{text_of(self.quantile(0.25))}–{text_of(self.quantile(0.75))}"

    def quantile(self, share: float) -> float:
        """The quantile of the PSNR; half way to infinity is infinite, as for NumPy's median."""
        values = np.sort(self.line.scored("psnr", "standard").to_numpy())
        if not len(values):
            return math.nan
        place = share * (len(values) - 1)
        lower, upper = values[math.floor(place)], values[math.ceil(place)]
        weight = place - math.floor(place)
        return float(
            lower if lower == upper or not weight else (1 - weight) * lower + weight * upper
        )

    def from_(self, decibels: float) -> Share:
        """The images at or above these decibels, of all that the attacker was given."""
        return success_share(self.line, decibels)

    @property
    def grey(self) -> float:
        """Mean PSNR of a uniform grey on the same images."""
        return summary(self.line, "grey_psnr", "diagnostic", interval=False).mean

    @property
    def always_masked(self) -> float:
        """Mean number of patches that were masked in every upload."""
        return summary(self.line, "always_masked", "diagnostic", interval=False).mean

    @property
    def accuracy(self) -> float:
        """Top-1 of the attacked model on the images, in percent."""
        return 100 * summary(self.line, "top1", "intact", interval=False).mean

    @property
    def _psnr(self) -> Summary:
        return summary(self.line, "psnr", "standard", cap=PSNR_CAP)

    def paper(self, metric: str) -> str:
        """A score as the paper defines it: mean [95 %] over the images."""
        decimals = 2 if metric == "psnr" else 4
        score = summary(self.line, metric, "paper", cap=PSNR_CAP if metric == "psnr" else math.inf)
        mean, low, high = (f"{x:.{decimals}f}" for x in (score.mean, score.low, score.high))
        return f"{mean} [{low}, {high}]"

    def fact(self, name: str) -> Any:
        """What tells this line from the others, such as its model or its γ."""
        return entry(self.line, name)

    def figure(self, name: str) -> float | int | str:
        """A figure by its name in claims.yaml, such as `exact`, `share20` or `from30`."""
        if name == "share_exact":
            return share_of_tried(self.line, self.exact, "paper").text()
        if name == "paper_average":
            return summary(self.line, "psnr", "paper", cap=PSNR_CAP, interval=False).mean
        if name.startswith("paper_"):
            return self.paper(name.removeprefix("paper_"))
        if (threshold := re.fullmatch(r"(share|from)(\d+)", name)) is not None:
            share = self.from_(int(threshold[2]))
            return share.text() if threshold[1] == "share" else share.count
        if name not in NAMES:
            raise UserError(f"There is no figure {name!r}; expected one of {', '.join(NAMES)}.")
        value: float | int | str = getattr(self, name)
        return value


@dataclass(frozen=True)
class CsvFigures:
    """Figures of one row of a CSV, for tables whose per-image rows were not kept."""

    row: Mapping[str, Any]

    def fact(self, name: str) -> Any:
        """A column that tells this row from the others."""
        return self.row[name]

    def figure(self, name: str) -> float | int | str:
        """A column by its name; `share20` counts the images that `success` is the share of."""
        row = self.row
        if name in row:
            value: float | int | str = row[name]
            return value
        if name in ("from20", "share20") and "success" in row:
            share = Share(round(float(row["success"]) * int(row["n"])), int(row["n"]))
            return share.count if name == "from20" else share.text()
        if name == "share100" and "from_100" in row:
            return Share(int(row["from_100"]), int(row["n"])).text()
        if name == "top1_interval":
            return f"{row['top1']:.1f} [{row['top1_low']:.1f}, {row['top1_high']:.1f}]"
        if name == "mean":
            names = ("psnr_mean", "psnr_mean_lo", "psnr_mean_hi")
            mean, low, high = (
                row[n] for n in (names if names[0] in row else ("psnr", "low", "high"))
            )
            return (
                "100, the cap" if low == high == PSNR_CAP else f"{mean:.1f} [{low:.1f}, {high:.1f}]"
            )
        raise UserError(f"The CSV has no column {name!r}; expected one of {', '.join(row)}.")


@dataclass(frozen=True)
class CountFigures:
    """How many rows of a CSV a condition holds for."""

    count: int
    of: int

    def figure(self, name: str) -> float | int | str:
        """`count` or `of`, the number of all rows."""
        return {"count": self.count, "of": self.of}[name]


def text_of(value: Any, spec: str = "") -> str:
    """A figure as it is printed: one decimal for a float, ∞ for an infinite one, – for none."""
    if not isinstance(value, float):
        return format(value, spec)
    if math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else format(value, spec or ".1f")


Figures = LineFigures | CsvFigures | CountFigures | SeedSpread
ENTRIES = ("run", "model", "setting", "gamma", "client", "dtype", "attack", "role", "uploads")


def entry(line: Line, key: str) -> Any:
    if key == "client":
        return published_client(line)
    own = {"run": line.run, "role": line.role, "attack": line.attack, "uploads": line.uploads}
    return own.get(key, line.cell.columns.get(key))
