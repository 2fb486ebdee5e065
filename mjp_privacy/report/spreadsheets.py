"""A report's CSV files as spreadsheets open them: no text in them begins like a formula."""

from __future__ import annotations

import pandas as pd

from mjp_privacy.metrics.spreadsheet import STARTS, formula_free


def with_formula_free(table: pd.DataFrame) -> pd.DataFrame:
    """The table with `formula_free` texts; numbers, and columns without such texts, are the same
    objects."""
    changed = {}
    for name, column in table.items():
        if pd.api.types.is_numeric_dtype(column) or not _has_any(column):
            continue
        changed[name] = [formula_free(cell) if isinstance(cell, str) else cell for cell in column]
    return table.assign(**{str(name): cells for name, cells in changed.items()})


def _has_any(column: pd.Series) -> bool:
    return any(isinstance(cell, str) and cell.startswith(STARTS) for cell in column.unique())
