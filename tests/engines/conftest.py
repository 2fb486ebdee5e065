"""Markers and fixtures of the engines' tests.

pytest tests/engines -m "not cluster and not nightly" takes half a minute of processor time;
`cluster` starts Ray or Slurm on this machine, `nightly` starts many processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from mjp_privacy.experiment.scores import long_rows
from mjp_privacy.experiment.store import RunStore
from tests.helpers.runs import attack, one_cell
from tests.helpers.trap import Trap

CONFIG = one_cell(attacks=[{"name": "trap"}, {"name": "grey"}], dtypes=["float32", "float64"])
"""Three blocks of three photographs; the trap attacks in two cells of two tasks."""
ROW = ["cell_key", "image_id", "metric", "variant"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: starts Ray or Slurm on this machine")
    config.addinivalue_line("markers", "nightly: takes long, or many processes")


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


@pytest.fixture(scope="module")
def here(
    nine_photographs: Path, planted_trap: Trap, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run of CONFIG in this process."""
    out = tmp_path_factory.mktemp("here")
    attack(nine_photographs, out, CONFIG)
    return out


@pytest.fixture
def trap(planted_trap: Trap, here: Path) -> Iterator[Trap]:
    planted_trap.reset()
    yield planted_trap
    planted_trap.reset()
