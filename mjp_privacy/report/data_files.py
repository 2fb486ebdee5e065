"""The rows behind a report as files for programs: samples.csv, choices.csv, and any table as CSV.

A score takes 0.35 kB as a row of CSV and 8 bytes in the run's own files, so 10⁸ of them would be
35 GB that no spreadsheet opens: from 200,000 on `samples.txt` says how to query the files, and
choices are written as parquet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.text import FORMULA_STARTS, formula_free
from mjp_privacy.report.cell_columns import CLIENT_FACTS
from mjp_privacy.report.lines import Line
from mjp_privacy.report.rows import UNREADABLE
from mjp_privacy.report.worst_case import DerivedLine

MOST_ROWS = 200_000
"""Rows up to which they are written as CSV: 70 MB."""

SAMPLES, WHERE_SAMPLES = "samples.csv", "samples.txt"
CHOICES, MANY_CHOICES = "choices.csv", "choices.parquet"

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


def samples_name(lines: Sequence[Line]) -> str:
    """The name of the file that `write_samples` writes."""
    return SAMPLES if _row_count(lines) <= MOST_ROWS else WHERE_SAMPLES


def _row_count(lines: Sequence[Line]) -> int:
    """At most so many scores are stored: not every image has every diagnostic."""
    return sum(len(line.images) * len(line.table.keys) for line in lines)


def write_samples(lines: Sequence[Line], out: Path, *, many_runs: bool) -> Path:
    """Write samples.csv, or samples.txt for many rows, into the folder; the file's path.

    A line without rows becomes one row with its status and reason.
    """
    name = samples_name(lines)
    if name == SAMPLES:
        columns = [*COLUMNS, "run"] if many_runs else [*COLUMNS]
        rows = (_samples(line).assign(run=line.run).reindex(columns=columns) for line in lines)
        write_csv(rows, out / SAMPLES)
    else:
        runs = [*dict.fromkeys(line.run for line in lines)]
        text = WHERE.format(
            rows=_row_count(lines),
            most=MOST_ROWS,
            plural="s" if len(runs) > 1 else "",
            runs=", ".join(runs),
            first=runs[0],
        )
        write_atomically(out / name, lambda place: place.write_text(text, encoding="utf-8"))
    return out / name


def _samples(line: Line) -> pd.DataFrame:
    """The line's rows, those of images that could not be read last."""
    if not line.stored:
        values = {"value": math.nan, "status": line.status, "reason": line.reason}
        return pd.DataFrame([{n: line.cell.columns.get(n) for n in COLUMNS} | values])
    rows = line.stored_rows
    last = (rows["status"] == UNREADABLE).to_numpy()
    return pd.concat([rows[~last], rows[last]]) if last.any() else rows


def write_choices(derived: Sequence[DerivedLine], out: Path) -> Path:
    """Write which attack each derived line took for which image into choices.csv, or, of many,
    choices.parquet; the file's path."""
    if sum(len(line.chosen) for line in derived) > MOST_ROWS:
        write_atomically(out / MANY_CHOICES, lambda path: _write_parquet(derived, path))
        return out / MANY_CHOICES
    write_csv((_choices(line) for line in derived), out / CHOICES)
    return out / CHOICES


def _choices(line: DerivedLine) -> pd.DataFrame:
    """A row for each image for which an attack was chosen, by image."""
    member = line.chosen.member
    images = line.chosen.images.index[member >= 0]
    chosen = pd.DataFrame(
        [(m.number, m.run_id, m.attack) for m in line.members],
        columns=["chosen_line", "chosen_run_id", "chosen_attack"],
    ).take(member[member >= 0])
    of_line = {"line": line.number, "run": line.run, "reduction": line.attack}
    return pd.concat(
        [pd.DataFrame(of_line, index=images).reset_index(), chosen.reset_index(drop=True)], axis=1
    )[[*of_line, "image_id", *chosen]]


def _write_parquet(derived: Sequence[DerivedLine], path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    words = ("run", "reduction", "image_id", "chosen_run_id", "chosen_attack")
    fields = {"line": pa.int32(), **dict.fromkeys(words, pa.string()), "chosen_line": pa.int32()}
    order = list(_choices(derived[0]))
    schema = pa.schema([(name, fields[name]) for name in order])
    with path.open("wb") as file, ParquetWriter(file, schema, compression="zstd") as writer:
        for line in derived:
            writer.write_table(pa.Table.from_pandas(_choices(line), schema, preserve_index=False))


# CSV ----------------------------------------------------------------------------------------------


def write_csv(tables: Iterable[pd.DataFrame], path: Path) -> None:
    """Write tables with the same columns below one another, one after the other."""

    def write(place: Path) -> None:
        with place.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            for at, table in enumerate(tables):
                file.write(csv_text(table, header=at == 0))

    write_atomically(path, write)


def csv_text(table: pd.DataFrame, *, header: bool = True) -> str:
    """A table as CSV for spreadsheets: no text in it begins like a formula."""
    changed = {}
    for name, column in table.items():
        if pd.api.types.is_numeric_dtype(column):
            continue
        if any(
            isinstance(cell, str) and cell.startswith(FORMULA_STARTS) for cell in column.unique()
        ):
            changed[str(name)] = [
                formula_free(cell) if isinstance(cell, str) else cell for cell in column
            ]
    return str(table.assign(**changed).to_csv(index=False, header=header, lineterminator="\n"))
