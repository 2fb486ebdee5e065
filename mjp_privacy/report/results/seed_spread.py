"""What another training seed moves, and which differences between trained rows exceed it.

    top1_seeds: {csv: ablations/summary.csv, measure: top1, seeds: [0, 1]}     a line of claims.yaml

A file that `tools/ablations.py` writes calls its models ROW_SEED. Rows that were trained from every
seed make a table of rows × seeds; models of one seed share their start and the order of images, so
a row's figure is taken as (row) + (seed) + noise. The noise's variance is that of a two-way table
without repetition; one estimate stands for all rows, because two seeds say little of one row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.core.errors import UserError

NUMBERS = ("rows", "freedom", "deviation", "resolved", "single", "widest")


@dataclass(frozen=True)
class SeedSpread:
    """One measure of all rows that were trained from every seed: values[row, seed]."""

    rows: Sequence[str]
    values: NDArray[np.float64]
    fixed: Sequence[str] = ()  # rows whose figure follows from how they are built: no noise

    @property
    def noisy(self) -> NDArray[np.float64]:
        """The values of the rows that a seed can move."""
        kept = [row not in self.fixed for row in self.rows]
        values: NDArray[np.float64] = self.values[np.array(kept, dtype=bool)]
        return values

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the noise."""
        rows, seeds = self.noisy.shape
        return max(rows - 1, 0) * (seeds - 1)

    @property
    def deviation(self) -> float:
        """The noise's standard deviation, of one training; NaN where fewer than two rows tell."""
        if self.freedom < 1:
            return math.nan
        values = self.noisy
        noise = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
        return math.sqrt(float((noise**2).sum()) / self.freedom)

    @property
    def resolved(self) -> float:
        """Half of the 95 % interval of a difference between two rows' means over the seeds."""
        return self.single / math.sqrt(self.noisy.shape[1])

    @property
    def single(self) -> float:
        """The same of two rows of one and the same seed."""
        from scipy.stats import t

        if self.freedom < 1:
            return math.nan
        return float(t.ppf(0.975, self.freedom)) * self.deviation * math.sqrt(2)

    @property
    def widest(self) -> float:
        """The largest difference between two seeds of one row."""
        return float(np.ptp(self.noisy, axis=1).max(initial=0.0))

    def differences(self, row: str, base: str) -> NDArray[np.float64] | None:
        """The row minus the base by seed; None unless both were trained from every seed."""
        if row not in self.rows or base not in self.rows:
            return None
        difference: NDArray[np.float64] = (
            self.values[self.rows.index(row)] - self.values[self.rows.index(base)]
        )
        return difference

    def figure(self, name: str) -> float | int:
        """A number for a sentence, by a name of NUMBERS."""
        if name not in NUMBERS:
            raise UserError(
                f"There is no figure {name!r} of seeds; expected one of {', '.join(NUMBERS)}."
            )
        value: float | int = len(self.noisy) if name == "rows" else getattr(self, name)
        return value


def seed_spread(
    summary: pd.DataFrame, measure: str, seeds: Sequence[int], fixed: Sequence[str] = ()
) -> SeedSpread:
    """The rows of `mjp evaluate`'s summary.csv that have a figure from all of these seeds."""
    if measure not in summary:
        raise UserError(
            f"The CSV has no column {measure!r}; expected {', '.join(map(str, summary))}."
        )
    known = summary.drop_duplicates("model").set_index("model")[measure].dropna()
    names = dict.fromkeys(str(label).rpartition("_")[0] for label in known.index)
    rows = [row for row in names if all(f"{row}_{seed}" in known.index for seed in seeds)]
    values = [[float(known[f"{row}_{seed}"]) for seed in seeds] for row in rows]
    return SeedSpread(rows, np.array(values, dtype=float).reshape(len(rows), len(seeds)), fixed)
