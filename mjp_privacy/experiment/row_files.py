"""The files of one cell's rows, and which of their rows count.

    rows/<run_id>/00003.parquet       block 3, as a run writes it
    rows/<run_id>/part-00000.parquet  many blocks in one file (`compaction`)

An image may be in several files while a run goes on, or after one was killed. Of an image that is
in a block's file the rows of parts do not count, for blocks are written later; of two parts the
later one counts. Of two blocks that hold the same rows of an image the one in which it did not fail
counts, or else the later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.experiment.part_file import OWN, PartTable, part_frame, part_number
from mjp_privacy.experiment.row_columns import CELL_COLUMNS, KEYS, NOT_DONE, ROW_COLUMNS
from mjp_privacy.experiment.score_table import JoinedTable, MemoryTable, ScoreTable

TRIES = 5
"""How often a folder is read whose files change meanwhile."""

NARROW = (*KEYS, "value", "status", "reason", "group", "code")
"""The columns that scores are computed from."""

T = TypeVar("T")


def block_files(folder: Path) -> list[Path]:
    """The files that runs wrote, in the order of their blocks."""
    return sorted(folder.glob("[0-9]*.parquet"), key=lambda path: int(path.stem))


def part_files(folder: Path) -> list[Path]:
    """The compacted files, the earliest first."""
    return sorted(folder.glob("part-*.parquet"), key=part_number)


def rows_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """The parts and the blocks' files, each in their order.

    Blocks are listed first: where a run compacts between the two listings, its rows are in both
    lists, or the files of the first one are gone when they are read. In neither they never are.
    """
    blocks = block_files(folder)
    return part_files(folder), blocks


def row_columns(folder: Path) -> list[str]:
    """The columns of the rows, in the order of `read_frame`."""
    return _settled(folder, _row_columns)


def _row_columns(parts: list[Path], blocks: list[Path]) -> list[str]:
    from pyarrow.parquet import read_metadata

    if not parts and not blocks:
        return [*ROW_COLUMNS, *CELL_COLUMNS]
    names = (name for path in (*blocks, *parts) for name in read_metadata(path).schema.names)
    return [name for name in dict.fromkeys(names) if name not in OWN]


def read_frame(folder: Path) -> pd.DataFrame:
    """All rows that count, in the order of their blocks; empty if there are none."""
    return _settled(folder, _read_frame)


def score_table(folder: Path) -> tuple[ScoreTable, frozenset[str]]:
    """The same rows by metric, and the columns that the files have.

    ValueError or OSError where a file cannot be read; the columns may lack some that are needed,
    and then there are no rows.
    """
    return _settled(folder, _score_table)


def _settled(folder: Path, read: Callable[[list[Path], list[Path]], T]) -> T:
    """Read a folder again if files went while it was read: they were compacted."""
    for _ in range(TRIES):
        try:
            return read(*rows_of(folder))
        except FileNotFoundError:
            continue
    return read(*rows_of(folder))


# as a table of rows -------------------------------------------------------------------------------


def _read_frame(parts: list[Path], blocks: list[Path]) -> pd.DataFrame:
    if not parts and not blocks:
        return pd.DataFrame(columns=[*ROW_COLUMNS, *CELL_COLUMNS])
    frames = [pd.read_parquet(path) for path in blocks]
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*KEYS])
    if {*KEYS, "status"} <= set(rows):
        rows = rows[~superseded(rows, _file_of_row(frames))].reset_index(drop=True)
    if not parts:
        return rows
    places = [_block_places(blocks, frames, rows)] if len(rows) else []
    pieces, taken = [rows] if len(rows) else [], set(rows["image_id"])
    for path in reversed(parts):
        frame, place = part_frame(path)
        kept = ~frame["image_id"].isin(taken).to_numpy()
        taken |= set(frame["image_id"])
        pieces.append(frame[kept])
        places.append(place[kept])
    order = np.argsort(np.concatenate(places), kind="stable")
    return pd.concat(pieces, ignore_index=True).iloc[order].reset_index(drop=True)


def _file_of_row(frames: Sequence[pd.DataFrame]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(frames)), [len(frame) for frame in frames])


def _block_places(
    blocks: Sequence[Path], frames: Sequence[pd.DataFrame], rows: pd.DataFrame
) -> NDArray[np.int64]:
    """The block of each row that was kept, which says where it stands among those of parts."""
    block_of = {
        image: int(path.stem)
        for path, frame in zip(blocks, frames, strict=True)
        for image in frame["image_id"].unique()
    }
    return np.array([block_of[image] for image in rows["image_id"]], dtype=np.int64)


def superseded(rows: pd.DataFrame, file: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Rows of block files that do not count, because another file holds the same of their image.

    file: the number of each row's file, in the order of blocks
    """
    nothing = np.zeros(len(rows), dtype=bool)
    image, _ = pd.factorize(rows["image_id"])
    files = int(file.max(initial=0)) + 1
    pairs = np.unique(image * files + file)
    in_two = np.bincount(pairs // files) > 1 if len(pairs) else np.zeros(0, dtype=bool)
    if not in_two.any():
        return nothing
    which = np.flatnonzero(in_two[image])
    some = rows.iloc[which]
    again = some.duplicated(list(KEYS), keep=False).to_numpy()
    across = pd.Series(image[which][again]).groupby(image[which][again]).first().index
    failed = np.isin(image * files + file, (image * files + file)[rows["status"].isin(NOT_DONE)])
    merit = np.where(failed, file, file + files)
    best = np.full(len(in_two), -1, dtype=np.int64)
    np.maximum.at(best, image, merit)
    return np.isin(image, across) & (merit < best[image])


# by metric ----------------------------------------------------------------------------------------


def _score_table(parts: list[Path], blocks: list[Path]) -> tuple[ScoreTable, frozenset[str]]:
    tables: list[ScoreTable] = []
    columns: frozenset[str] = frozenset()
    if blocks or not parts:
        rows, columns = _read_narrow(blocks)
        if not set(ROW_COLUMNS) <= columns and blocks:
            return MemoryTable(_nothing()), columns
        tables.append(MemoryTable(rows))
    for path in reversed(parts):
        part = PartTable(path)
        tables.append(part)
        columns |= part.columns
    return (tables[0] if len(tables) == 1 else JoinedTable(tables)), columns


def _nothing() -> pd.DataFrame:
    return pd.DataFrame(columns=list(NARROW)).astype({"value": float})


def _read_narrow(blocks: Sequence[Path]) -> tuple[pd.DataFrame, frozenset[str]]:
    """The columns that scores need of all block files, and the names of all that the files have."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile, read_metadata

    tables = []
    names: frozenset[str] = frozenset(ROW_COLUMNS) if not blocks else frozenset()
    for path in blocks:
        metadata = read_metadata(path)
        names |= set(metadata.schema.names)
        wanted = [name for name in NARROW if name in metadata.schema.names]
        words = [name for name in wanted if name != "value"]
        with ParquetFile(path, metadata=metadata, read_dictionary=words) as file:
            tables.append(file.read(wanted, use_threads=False))
    if not set(ROW_COLUMNS) <= names or not tables:
        return _nothing(), names
    whole = pa.concat_tables(tables, promote_options="permissive")
    rows = whole.unify_dictionaries().to_pandas(strings_to_categorical=True)
    file_of_row = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return rows[~superseded(rows, file_of_row)], names
