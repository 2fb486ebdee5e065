"""Trained rows of the paper's Table 3 or 4 minus one of them, by training seed.

    spread: {csv: ablations/summary.csv, seeds: [0, 1], paper: 4, against: A,
             measures: {top1: [], consistency: [B]}}        beside each measure its fixed rows

The interval says what another seed would move (`seed_spread`), not what other test images would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError
from mjp_privacy.report.results.lines import csv_at
from mjp_privacy.report.results.seed_spread import SeedSpread, seed_spread
from mjp_privacy.report.results.trained_rows import name_here, printed_rows
from mjp_privacy.report.tables.text import DASH

TITLES = {"top1": "top-1", "consistency": "consistency"}


def spread_table(table: Mapping[str, Any], folder: Path) -> Iterator[list[str]]:
    """The cells of a table of differences from one row, its heads first; `folder`: results/."""
    summary, base = csv_at(folder / table["csv"]), table["against"]
    printed = printed_rows(table["paper"])
    if base not in printed:
        raise UserError(f"spread: against: expected one of {', '.join(printed)}, got {base!r}.")
    named = printed[base].row.partition(":")[0]
    heads = [
        f"{TITLES.get(m, m)} − {named}{end}"
        for m in table["measures"]
        for end in (", by seed", ", mean [95 %]", ", paper")
    ]
    yield ["row", *heads]
    spreads = {
        measure: seed_spread(summary, measure, table["seeds"], fixed)
        for measure, fixed in table["measures"].items()
    }
    for name, row in printed.items():
        if name == base:
            continue
        cells: list[str] = []
        for measure, spread in spreads.items():
            cells += _difference(spread, name, base)
            paper, of_base = getattr(row, measure), getattr(printed[base], measure)
            cells.append(DASH if None in (paper, of_base) else f"{paper - of_base:+.1f}")
        yield [name_here(row), *cells]


def _difference(spread: SeedSpread, row: str, base: str) -> list[str]:
    """The difference of each seed, and their mean with its 95 % interval."""
    by_seed = spread.differences(row, base)
    if by_seed is None:
        return [DASH, DASH]
    mean, half = by_seed.mean(), spread.resolved
    noisy = not math.isnan(half) and not {row, base} & {*spread.fixed}
    interval = "" if not noisy else f" [{mean - half:+.1f}, {mean + half:+.1f}]"
    return [", ".join(f"{value:+.1f}" for value in by_seed), f"{mean:+.1f}{interval}"]
