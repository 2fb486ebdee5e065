"""Every stored row beside a report: as CSV for a small run, else where and how to read them.

A score takes 0.35 kB as a row of CSV and 8 bytes in the run's own files, so 10⁸ of them would be
35 GB that no spreadsheet opens; from 200,000 on `samples.txt` says how to query the files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from mjp_privacy.core.files import write_atomically
from mjp_privacy.report.cell_columns import CLIENT_FACTS
from mjp_privacy.report.line import Line
from mjp_privacy.report.scores import UNREADABLE
from mjp_privacy.report.spreadsheets import with_formula_free

MOST_ROWS = 200_000
"""Rows up to which they are written as CSV: 70 MB."""

CSV, TEXT = "samples.csv", "samples.txt"

COLUMNS = (
    *("run_id", "model", "setting", "gamma", "attack", "dtype", "seed"),
    *("image_id", "metric", "variant", "value", "status", "reason"),
    *("checkpoint_sha", "architecture", "trained_gamma", "position_embedding"),
    *("victim", "engine", "attack_name", "role", "uploads", *CLIENT_FACTS, "round"),
    *("label_source", "code", "group"),
)
"""The columns of samples.csv: the score, the facts of its cell, and what is known of its image."""

WHERE = """\
{rows:,} scores are more than a CSV file is good for (samples.csv is written up to {most:,}).
They are in the run folder{plural} {runs}, as parquet files: rows/<run_id>/*.parquet, one row for
each image, with a column for each metric and variant ("psnr.standard", "ssim.paper",
"gradient_residual.diagnostic"); what all rows of a cell have in common is in cells.*.parquet. For
example, in the folder above {first}:

    duckdb -c "SELECT attack, setting, gamma, avg(least(\\"psnr.standard\\", 100)), count(*)
               FROM read_parquet('{first}/rows/**/*.parquet', union_by_name=true) AS scores
               JOIN read_parquet('{first}/cells.*.parquet') AS cells USING (run_id)
               WHERE scores.status = 'ok' GROUP BY ALL"

    polars:  pl.scan_parquet("{first}/rows/**/*.parquet", missing_columns="insert",
                             extra_columns="ignore")
    pandas:  RunStore(Path("{first}")).read(run_id)         # from mjp_privacy.experiment.store

Of an image that is in several files of a cell, as after some images were attacked again, the file
with the highest second number counts (00003.0002.….parquet); RunStore reads that one alone.
"""


def row_count(lines: Sequence[Line]) -> int:
    """At most so many scores are stored: not every image has every diagnostic."""
    return sum(len(line.images) * len(line.table.keys) for line in lines)


def samples_name(lines: Sequence[Line]) -> str:
    """The name of the file that `write_samples` writes."""
    return CSV if row_count(lines) <= MOST_ROWS else TEXT


def write_samples(lines: Sequence[Line], out: Path, *, many_runs: bool) -> Path:
    """Write samples.csv, or samples.txt for many rows, into the folder; the file's path.

    A line without rows becomes one row with its status and reason.
    """
    if samples_name(lines) == CSV:
        path, other = out / CSV, out / TEXT
        write_atomically(path, lambda place: _write_csv(lines, place, many_runs=many_runs))
    else:
        path, other = out / TEXT, out / CSV
        text = _where(lines, row_count(lines))
        write_atomically(path, lambda place: place.write_text(text, encoding="utf-8"))
    other.unlink(missing_ok=True)
    return path


def _where(lines: Sequence[Line], rows: int) -> str:
    runs = [*dict.fromkeys(line.run for line in lines)]
    plural = "s" if len(runs) > 1 else ""
    return WHERE.format(
        rows=rows, most=MOST_ROWS, plural=plural, runs=", ".join(runs), first=runs[0]
    )


def _write_csv(lines: Sequence[Line], path: Path, *, many_runs: bool) -> None:
    names = [*COLUMNS, "run"] if many_runs else [*COLUMNS]
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        for line in lines:
            rows = with_formula_free(_rows(line).assign(run=line.run).reindex(columns=names))
            rows.to_csv(file, index=False, header=line is lines[0], lineterminator="\n")


def _rows(line: Line) -> pd.DataFrame:
    """The line's rows, those of images that could not be read last."""
    if not line.stored:
        values = {"value": math.nan, "status": line.status, "reason": line.reason}
        return pd.DataFrame([{n: line.cell.columns.get(n) for n in COLUMNS} | values])
    rows = line.stored_rows
    last = (rows["status"] == UNREADABLE).to_numpy()
    return pd.concat([rows[~last], rows[last]]) if last.any() else rows
