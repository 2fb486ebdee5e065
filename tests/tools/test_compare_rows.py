"""Rows of two runs are compared by what they are about, not by where they stand."""

from pathlib import Path

import numpy as np
import pandas as pd

from tools.compare_rows import KEY, apart, comparison, rows_of

STANDARD = "python3.11_torch2.11.0+0.26.0_plain.parquet"


def rows(**changed: float) -> pd.DataFrame:
    """Four images' PSNR in two precisions; `changed` gives image a another value by precision."""
    table = pd.DataFrame(
        [
            dict.fromkeys(KEY, "x") | {"gamma": 0.27, "dtype": dtype, "image_id": image}
            for dtype in ("float64", "float32")
            for image in "abcd"
        ]
    )
    table["metric"] = "psnr"
    table["value"] = [20.0, np.inf, np.nan, 40.0] * 2
    table["status"], table["reason"] = "ok", ""
    for dtype, value in changed.items():
        table.loc[(table.dtype == dtype) & (table.image_id == "a"), "value"] = value
    return table


def written(table: pd.DataFrame, path: Path) -> Path:
    table.to_parquet(path)
    return path


def test_distances_are_relative_above_one_and_infinite_where_a_value_is_lost(
    tmp_path: Path,
) -> None:
    first = rows_of(written(rows(), tmp_path / "first.parquet"))
    shuffled = rows(float64=20.5, float32=np.nan).sample(frac=1, random_state=0)
    second = rows_of(written(shuffled, tmp_path / "second.parquet"))
    distance = apart(first, second)
    assert distance.groupby("dtype").max().to_dict() == {"float64": 0.5 / 20, "float32": np.inf}
    assert (distance == 0).sum() == 6


def test_a_line_says_how_far_a_run_is_from_the_standard(tmp_path: Path) -> None:
    written(rows(), tmp_path / STANDARD)
    written(rows(float64=20.0 + 1e-9), tmp_path / "near.parquet")
    written(rows().iloc[1:], tmp_path / "short.parquet")
    other = rows()
    other.loc[0, ["status", "reason"]] = "failed", "why"
    written(other, tmp_path / "other.parquet")
    lines = {line.split(" | ")[0].strip("| "): line for line in comparison(tmp_path)}
    assert lines["near"] == (
        "| near | 8 | 0 | 87.5 % | 5.0e-11 | 1.0e-09 | 5.0e-10 | 0.0e+00 | 0.0e+00 | 0.0e+00 |  |"
    )
    assert lines["other"].startswith("| other | 8 | 1 | 100.0 % |")
    assert lines["short"].startswith("| short | 7 | 1 rows stand in one of both alone |")
