"""The per-image rows of a published table in one small file: `results/ladder/rows.parquet`.

One row for each line of the report and image. What describes a line stands in columns of its own,
so that any program can read the file; every fact of it stands in the file's metadata, from which
`read_published` makes the report's own lines again: the worst case, intervals and medians of a
published table come from the code that makes every report.

    python -m mjp_privacy.report.results.rows RUN --out results/ladder/rows.parquet --commit SHA
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.core.read import FileKind, json_value, read_json_lines, yaml_value
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.cell_facts import CellFacts
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.lines import Line
from mjp_privacy.report.results.columns import REPEATS, cells, line_rows, score_table
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.worst_case import derived_lines, reduced_groups

KEY = "mjp_privacy"  # of the metadata, JSON
ROWS = FileKind("a file of published rows", "Write it again from the run.", 1 << 30)
LOG = FileKind("the log of a run", "Take it away.", 1 << 32)
REPEATED = FileKind("a CSV with image_id and repeated_patches", "Count them again.", 1 << 28)
EXPERIMENT = FileKind("the experiment of a run", "Run the attack again.", 1 << 24)


@dataclass(frozen=True)
class PublishedRun:
    """The run that rows came from."""

    name: str
    config: str  # the experiment's name
    config_sha256: str  # of the run's experiment.yaml, the config as it was resolved
    commit: str | None  # of the code, as the run noted it
    torch: str | None
    threads: int | None  # of each worker; more than one in runs of earlier versions
    date: str | None  # of the run's start, UTC
    commits: str | None = None  # of the code that made its rows, where not all of the file's did


@dataclass(frozen=True)
class Published:
    """A file of published rows: read_published("results/ladder/rows.parquet").lines[0].label."""

    commit: str  # of the code that made the rows
    runs: tuple[PublishedRun, ...]
    rows: pd.DataFrame  # one row for each line and image
    lines: tuple[Line, ...]

    @cached_property
    def all_lines(self) -> tuple[Line, ...]:
        """The lines, then those that are derived from them: worst case, attacker's choice."""
        return (*self.lines, *derived_lines(reduced_groups(self.lines)))


# writing ------------------------------------------------------------------------------------------


def write_published(
    runs: Sequence[Path],
    path: Path,
    *,
    commit: str,
    source: str | None = None,
    repeats: Mapping[str, int] | None = None,
    paper_scores: bool = False,
    finished_only: bool = False,
) -> None:
    """Write the rows of these runs, finished or not, into one parquet file.

    commit         of the code that made the rows
    source         what the pictures are, in place of the name of the command's folder
    repeats        repeated patches by image_id (`repeated_patches.py`), a column of their own
    paper_scores   also keep the paper's variant of each score, not of PSNR alone
    finished_only  of a run that still grows, only the images that every line of the model has

        write_published([Path("results/demo")], Path("rows.parquet"), commit="dc26fec")
    """
    lines = load_runs(runs).lines
    frames = [line_rows(line, paper_scores=paper_scores) for line in lines if len(line.images)]
    if not frames:
        raise UserError(f"Expected runs with rows, got none in {', '.join(map(str, runs))}.")
    frame = pd.concat(frames, ignore_index=True)
    if finished_only:
        frame = finished_images(frame, lines)
    if repeats is not None:
        frame[REPEATS] = frame["image_id"].map(dict(repeats)).astype("Int16")
    facts = {
        "commit": commit,
        "runs": [asdict(_published_run(run, line.run)) for run, line in _first_lines(runs, lines)],
        **cells(lines, source),
    }
    write_rows(frame, facts, path)


def finished_images(frame: pd.DataFrame, lines: Sequence[Line]) -> pd.DataFrame:
    """The rows of images that every line of the same run and model has rows of."""
    planned = Counter((line.run, line.cell.model.label) for line in lines)
    having = frame.groupby(["run", "model", "image_id"])["line"].transform("nunique")
    wanted = [planned[key] for key in zip(frame["run"], frame["model"], strict=True)]
    return frame[having.to_numpy() == np.array(wanted)].reset_index(drop=True)


def _first_lines(runs: Sequence[Path], lines: Sequence[Line]) -> list[tuple[Path, Line]]:
    firsts: dict[str, Line] = {}
    for line in lines:
        firsts.setdefault(line.run, line)
    return list(zip(runs, firsts.values(), strict=True))


def _published_run(run: Path, name: str) -> PublishedRun:
    config = EXPERIMENT.bytes(run / "experiment.yaml")
    log = run / "log.jsonl"
    start = (read_json_lines(log, LOG) or [{}])[0]
    moment = start.get("time")
    return PublishedRun(
        name=name,
        config=str(yaml_value(config.decode(), shown(run))["experiment"]["name"]),
        config_sha256=hashlib.sha256(config).hexdigest(),
        commit=start.get("commit"),
        torch=start.get("torch"),
        threads=start.get("threads", 1 if start else None),
        date=None if moment is None else _day(moment),
    )


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).date().isoformat()


def write_rows(frame: pd.DataFrame, facts: Mapping[str, Any], path: Path) -> None:
    """Write rows and facts as published_facts reads them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    floats = [field.name for field in table.schema if pa.types.is_float32(field.type)]
    layout = {
        "use_dictionary": [name for name in table.schema.names if name not in floats],
        "use_byte_stream_split": floats,
    }

    def write(place: Path) -> None:
        with pq.ParquetWriter(
            place, table.schema, compression="zstd", compression_level=19, **layout
        ) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata({KEY: json.dumps(facts, sort_keys=True)})

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)


# reading ------------------------------------------------------------------------------------------


def read_published(path: Path | str) -> Published:
    """The rows of a published table, and the report's lines made from them."""
    path = Path(path)
    facts, frame = published_facts(path)
    with ROWS.reading(path):
        return _published(facts, frame, path)


def published_facts(path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The facts of a published file as they are stored, and its rows."""
    import pyarrow.parquet as pq

    if not path.is_file():
        raise UserError(f"Expected published rows at {path}, but there is no such file.")
    ROWS.check(path)
    with ROWS.reading(path):
        file = pq.ParquetFile(path)
        metadata = (file.metadata.metadata or {}).get(KEY.encode())
    if metadata is None:
        raise UserError(
            f"{shown(path)} is no file of published rows: expected one that "
            "`python -m mjp_privacy.report.results.rows` wrote."
        )
    with ROWS.reading(path):
        return json_value(metadata.decode(), path, ROWS), file.read().to_pandas()


def _published(facts: Mapping[str, Any], frame: pd.DataFrame, path: Path) -> Published:
    by_line = dict(tuple(frame.groupby("line", sort=False)))
    store = RunStore(path.parent / "no reconstructions are published")
    lines = tuple(
        _line(entry, facts["shared"], by_line.get(entry["number"], frame.head(0)), store)
        for entry in facts["lines"]
    )
    runs = tuple(PublishedRun(**run) for run in facts["runs"])
    return Published(facts["commit"], runs, frame, lines)


def _line(
    entry: Mapping[str, Any], shared: Mapping[str, Any], rows: pd.DataFrame, store: RunStore
) -> Line:
    cell = CellFacts.read({**shared, **entry["cell"]})
    return Line(entry["number"], entry["run"], cell, score_table(rows), store)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the rows of the runs on the command line."""
    parser = argparse.ArgumentParser(description=write_published.__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="run folders, each the --out of an attack"
    )
    parser.add_argument("--out", type=Path, required=True, help="the parquet file")
    parser.add_argument("--commit", required=True, help="of the code that made the rows")
    parser.add_argument("--source", help="what the pictures are")
    parser.add_argument("--repeats", type=Path, help="CSV with image_id and repeated_patches")
    parser.add_argument("--finished-only", action="store_true", help="of a run that still grows")
    parser.add_argument("--paper-scores", action="store_true", help="keep the paper's variants too")
    given = parser.parse_args(argv)
    repeats = None
    if given.repeats is not None:
        REPEATED.check(given.repeats)
        with REPEATED.reading(given.repeats):
            counted = pd.read_csv(given.repeats, dtype={"image_id": str})
        repeats = dict(zip(counted["image_id"], counted[REPEATS], strict=True))
    write_published(
        given.runs,
        given.out,
        commit=given.commit,
        source=given.source,
        repeats=repeats,
        paper_scores=given.paper_scores,
        finished_only=given.finished_only,
    )
    rows = read_published(given.out).rows
    print(f"{given.out}: {len(rows)} rows, {given.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
