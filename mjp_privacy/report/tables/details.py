"""What bounds the scores and what else was measured."""

from __future__ import annotations

from functools import partial
from operator import itemgetter

import pandas as pd

from mjp_privacy.report.figures import REGIONS, Table
from mjp_privacy.report.tables.text import (
    DASH,
    Column,
    Record,
    TextTable,
    attack,
    condition,
    gamma,
    number,
    records,
    table_of,
)

MEASURED_CAPTION = (
    "Ceiling: PSNR of the true patch embeddings inverted by minimum norm, against the image that "
    "the client fed: the limit that the rank of the embedding sets to attacks without a prior. "
    "Oracle in place: the same with the patches left in the order they were fed, in (c) below the "
    "ceiling. Below grey: percent of the images for which a uniform grey scores better; there the "
    "attack failed, which measures no protection. Medians: cond(A), the numerical rank of A at the "
    "gradient's precision, its nonzero rows, shuffled patches. Empty masks: images in which no "
    "patch was shuffled. Mask precision: the share of the patches taken for shuffled that are; "
    "mask recall: the share of the shuffled patches that are found. PSNR, unmasked and masked: "
    "over the pixels of patches that were not shuffled and that were; the mean image on the former "
    "is their floor. Oracle permutation: the attack's patches put back with the true permutation, "
    "which is no attack's result. Jigsaw, direct and neighbour: the share of shuffled patches put "
    "back into their place, and of neighbouring pairs restored. Gradient residual: the relative "
    "distance of the reconstruction's gradient from the uploaded one, without the private image. "
    "Means, PSNR capped at 100 dB, or medians where said; n where it differs from the line's."
)

BOUNDS: tuple[tuple[str, str, int | None, str | None], ...] = (
    ("ceiling", "ceiling_mean", 2, "ceiling_n"),
    ("ceiling − PSNR", "ceiling_distance", 2, None),
    ("oracle in place", "in_place_mean", 2, None),
    ("below grey, %", "below_grey", 0, "below_grey_n"),
    ("cond(A)", "cond_a_median", None, None),
    ("rank(A)", "rank_a_median", 0, None),
    ("nonzero rows", "nonzero_rows_median", 0, None),
    ("shuffled patches", "shuffled_patches_median", 0, None),
    ("empty masks", "empty_masks", 0, None),
)
"""Columns of table.csv: title, name, decimals, and the column of their n."""


def measured_table(standard: Table) -> TextTable:
    """Ceilings, the linear system, masks and residuals: a column for what some line has."""
    rows = records(standard)
    measures = ((m.title, m.column, m.decimals, m.column_of_n) for m in REGIONS)
    figures = [of for of in (*BOUNDS, *measures) if any(pd.notna(row.get(of[1])) for row in rows)]
    columns = [
        Column("#", itemgetter("line")),
        Column("Model", itemgetter("model"), "l"),
        Column("Set.", itemgetter("setting"), "l"),
        Column("γ", lambda r: gamma(r["gamma"]), "l"),
        Column("Attack", attack, "l"),
        Column("dtype", itemgetter("dtype"), "l"),
        *(Column(title, partial(_figure, name, digits, n)) for title, name, digits, n in figures),
    ]
    title = "Ceilings, the linear system, masks and residuals"
    return table_of(title, MEASURED_CAPTION, columns, rows)


def _figure(name: str, decimals: int | None, column_of_n: str | None, record: Record) -> str:
    value = record[name]
    if value is None or value != value:
        return DASH
    text = condition(value) if decimals is None else number(float(value), decimals)
    n = record[column_of_n] if column_of_n else record["psnr_n"]
    return text if n == record["psnr_n"] else f"{text} (n={n})"
