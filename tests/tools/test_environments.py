"""tools/test-environments: rows of two runs are compared by what they are about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from tests.helpers.runs import attack, one_cell, photographs
from tests.helpers.scripts import script


def test_a_line_says_how_far_a_run_is_from_the_standard(tmp_path: Path) -> None:
    """Distances are relative above one, and infinite where a value is lost."""
    tool = script("test-environments")
    config = one_cell(attacks=[{"name": "grey"}], dtypes=["float32", "float64"])
    attack(photographs(tmp_path / "images", 3), tmp_path / "run", config)
    standard, rows = tmp_path / f"{tool.STOCK[0].replace('=', '_torch')}.parquet", tmp_path / "rows"
    program = [sys.executable, "-c", tool.STORED_ROWS, str(tmp_path / "run"), str(rows)]
    subprocess.run(program, check=True)
    rows = pd.read_parquet(rows)
    rows = rows[rows["metric"] == "psnr"]
    rows.assign(value=20.0).to_parquet(standard)
    first = rows["image_id"] == "0.png"
    double = rows["dtype"] == "float64"
    near = rows.assign(value=20.0)
    near.loc[first & double, "value"] = 20.5
    near.loc[first & ~double, "value"] = np.nan
    near.sample(frac=1, random_state=0).to_parquet(tmp_path / "near.parquet")
    near.iloc[1:].to_parquet(tmp_path / "short.parquet")
    other = rows.assign(value=20.0, status=rows["status"].where(~first, "failed"))
    other.to_parquet(tmp_path / "other.parquet")
    lines = {line.split(" | ")[0][2:]: line for line in tool.comparison(tmp_path).splitlines()}
    print(tool.comparison(tmp_path))
    assert lines["near"].endswith(" | 2.5e-02 | 5.0e-01 | 0.0e+00 | inf | inf | 0.0e+00 |")
    assert lines["near"].split(" | ")[1:4] == ["12", "0", "66.7 %"]
    assert lines["other"].split(" | ")[1:4] == ["12", "4", "100.0 %"]
    assert lines["short"].startswith("| short | 11 | has other rows |")
