"""The figures of a report, made again from a run's parquet files by pandas and NumPy alone.

Nothing of the package is imported here: a mistake of the report is not repeated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

CAP = 100.0  # dB, of PSNR in means
RESAMPLES = 20_000


def cells_of(run: Path) -> pd.DataFrame:
    """A row for each cell of a run, in their order."""
    return pd.read_parquet(max(run.glob("cells.*.parquet")))


def rows_of(run: Path, run_id: str) -> pd.DataFrame:
    """The images of a cell in the order of their ids; of one in two files the later file's."""
    files = sorted((run / "rows" / run_id).glob("*.parquet"))
    frames = [pd.read_parquet(file).assign(attempt=file.name.split(".")[1]) for file in files]
    rows = pd.concat(frames).sort_values("attempt", kind="stable")
    return rows.drop_duplicates("image_id", keep="last").set_index("image_id").sort_index()


def scored(rows: pd.DataFrame, column: str) -> pd.Series[float]:
    """The values of a metric that count."""
    if column not in rows:
        return pd.Series(dtype=float)
    return rows.loc[rows["status"] == "ok", column].dropna()


def mean(values: pd.Series[float], column: str) -> float:
    """Per image first, average last; PSNR is capped."""
    return float((values.clip(upper=CAP) if column.startswith("psnr") else values).mean())


def interval(values: pd.Series[float], photographs: pd.Series[str]) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean; crops of one photograph are drawn together."""
    parts = values.clip(upper=CAP).groupby(photographs[values.index])
    sums, sizes = parts.sum().to_numpy(), parts.size().to_numpy()
    drawn = np.random.default_rng(7).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def photographs_of(rows: pd.DataFrame) -> pd.Series[str]:
    """The photograph that each image was cut from: itself where none is named."""
    return rows["group"].where(rows["group"].notna(), rows.index.to_series())


def exact(rows: pd.DataFrame) -> int:
    """Images equal in every 8-bit value."""
    return int(np.isposinf(scored(rows, "psnr.paper")).sum())


def from_20_db(rows: pd.DataFrame) -> int:
    """Images at 20 dB or more."""
    return int((scored(rows, "psnr.standard") >= 20).sum())


def best_of(attacks: dict[str, pd.DataFrame], column: str = "psnr.standard") -> pd.Series[str]:
    """The attack that each image is taken from: the highest value, the first of equals."""
    return pd.DataFrame({name: scored(rows, column) for name, rows in attacks.items()}).idxmax(
        axis=1
    )


def worst_case(attacks: dict[str, pd.DataFrame], column: str) -> pd.Series[float]:
    """A metric of every image's best attack."""
    chosen = best_of(attacks)
    return pd.Series({image: attacks[name].loc[image, column] for image, name in chosen.items()})
