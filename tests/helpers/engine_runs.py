"""The run that the engines' tests have done, and its rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.rows import long_rows
from tests.helpers.runs import one_cell

CONFIG = one_cell(attacks=[{"name": "trap"}, {"name": "grey"}], dtypes=["float32", "float64"])
"""Three blocks of three photographs; the trap attacks in two cells of two tasks."""
ROW = ["cell_key", "image_id", "metric", "variant"]


def all_rows(out: Path) -> pd.DataFrame:
    """The rows of a run, without what a clock measured; none of them stands there twice."""
    store = RunStore(out)
    parts = [long_rows(store, str(cell["run_id"]), cell) for cell in store.read_cells()]
    rows = pd.concat(parts).sort_values(ROW, kind="stable").reset_index(drop=True)
    assert not rows.duplicated(ROW).any()
    return rows[~rows["metric"].str.contains("seconds")].reset_index(drop=True)


def same_rows(one: Path, other: Path) -> None:
    """Every row is equal to the last bit, and nothing is left of the workers."""
    pd.testing.assert_frame_equal(all_rows(one), all_rows(other), check_exact=True)
    assert not (other / "work").exists()
