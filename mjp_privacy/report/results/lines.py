"""Which line of published rows, or row of a CSV, a claim is about.

    select({"rows": "ladder/rows.parquet", "attack": "pixel_lattice"}, Path("results"))

A selection names as many entries (model, setting, γ, client, attack, any fact of the cell) as tell
one line from the others; `dtype` is float32 unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import FileKind
from mjp_privacy.metrics.coded import Images
from mjp_privacy.report.lines import Line
from mjp_privacy.report.results.columns import REPEATS
from mjp_privacy.report.results.figures import (
    ENTRIES,
    CountFigures,
    CsvFigures,
    Figures,
    LineFigures,
    entry,
)
from mjp_privacy.report.results.rows import Published, read_published
from mjp_privacy.report.results.seed_spread import seed_spread
from mjp_privacy.report.rows import JoinedTable

CSV = FileKind("a table of results/", "Make it again, as results/README.md says.")
Selection = Mapping[str, Any]


def select(selection: Selection, folder: Path) -> Figures:
    """The one line or CSV row that a selection of claims.yaml names; `folder`: results/.

    `{csv: FILE, query: "label % 5 == 0"}` counts rows instead, and `{csv: FILE, measure: top1,
    seeds: [0, 1]}` tells how far training seeds move one column.
    """
    if "query" in selection:
        rows = csv_at(folder / selection["csv"])
        return CountFigures(len(rows.query(selection["query"])), len(rows))
    if "measure" in selection:
        summary = csv_at(folder / selection["csv"])
        fixed = selection.get("fixed", ())
        return seed_spread(summary, selection["measure"], selection["seeds"], fixed)
    if "csv" in selection:
        return _csv_row(selection, folder)
    conditions = {key: value for key, value in selection.items() if key not in ("rows", "only")}
    published = published_at(folder / selection["rows"])
    found = [line for line in published.all_lines if _fits(line, conditions)]
    if len(found) != 1:
        raise UserError(
            f"Expected one line in {selection['rows']} for {dict(conditions)}, got {len(found)}"
            f"{': ' + '; '.join(describe(line) for line in found[:6]) if found else ''}. "
            "Name more of run, model, setting, gamma, client, dtype, attack, role, uploads."
        )
    return LineFigures(restricted(found[0], selection.get("only"), published))


def select_all(selection: Selection, folder: Path) -> Sequence[LineFigures | CsvFigures]:
    """Every line of a rows file, or every row of a CSV, that fits the selection."""
    if "csv" in selection:
        return [CsvFigures(dict(row)) for _, row in _csv_rows(selection, folder).iterrows()]
    published = published_at(folder / selection["rows"])
    conditions = {key: value for key, value in selection.items() if key not in ("rows", "only")}
    return [
        LineFigures(restricted(line, selection.get("only"), published))
        for line in published.all_lines
        if _fits(line, conditions)
    ]


def describe(line: Line) -> str:
    """The entries of a line that a selection can name."""
    return ", ".join(f"{key}={entry(line, key)}" for key in ENTRIES)


def _fits(line: Line, conditions: Mapping[str, Any]) -> bool:
    wanted = {"dtype": "float32", **conditions}
    return all(
        entry(line, key) in value if isinstance(value, list) else entry(line, key) == value
        for key, value in wanted.items()
    )


def restricted(line: Line, only: str | None, published: Published) -> Line:
    """The line on part of its images: `repeats` or `no repeats` of a patch in the picture."""
    if only is None:
        return line
    pictures = published.rows.drop_duplicates("image_id").set_index("image_id")[REPEATS]
    if only not in ("repeats", "no repeats") or pictures.isna().any():
        raise UserError(
            f"Expected only: repeats, or: no repeats, on rows that count them; got {only!r}."
        )
    kept = pictures.index[(pictures > 0) == (only == "repeats")]
    images = Images.of(line.images.names & set(kept.astype(str)))
    return replace(line, table=JoinedTable([line.table], images))


def _csv_row(selection: Selection, folder: Path) -> CsvFigures:
    rows = _csv_rows(selection, folder)
    if len(rows) != 1:
        raise UserError(
            f"Expected one row of {selection['csv']} for {dict(selection)}, got {len(rows)}. "
            "Name more of its columns."
        )
    return CsvFigures(dict(rows.iloc[0]))


def _csv_rows(selection: Selection, folder: Path) -> pd.DataFrame:
    rows = csv_at(folder / selection["csv"])
    for key, value in selection.items():
        if key != "csv":
            rows = rows[rows[key].isin(value if isinstance(value, list) else [value])]
    return rows


@cache
def published_at(path: Path) -> Published:
    """A file of published rows, read once."""
    return read_published(path)


@cache
def csv_at(path: Path) -> pd.DataFrame:
    """A CSV of results/, read once."""
    CSV.check(path)
    with CSV.reading(path):
        return pd.read_csv(path)
