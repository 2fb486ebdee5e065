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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mjp_privacy.experiment.block_file import check_values
from mjp_privacy.experiment.image_names import Images
from mjp_privacy.experiment.open_rows import open_rows
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


@dataclass(frozen=True)
class LeftOut:
    """Rows that do not count, because they or their pictures are damaged (`damage`)."""

    files: frozenset[Path] = frozenset()
    blocks: frozenset[int] = frozenset()
    because: frozenset[Path] = frozenset()  # the damaged files of rows and of pictures

    def __bool__(self) -> bool:
        return bool(self.because)

    def files_left(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """The parts and the blocks' files of a folder that hold rows that count."""
        parts, blocks = rows_of(folder)
        whole = [path for path in blocks if int(path.stem) not in self.blocks]
        return (
            [path for path in parts if path not in self.files],
            [path for path in whole if path not in self.files],
        )


NOTHING = LeftOut()


def row_columns(folder: Path, left_out: LeftOut = NOTHING) -> list[str]:
    """The columns of the rows, in the order of `read_frame`."""
    return settled(folder, left_out, _row_columns)


def _row_columns(parts: list[Path], blocks: list[Path]) -> list[str]:
    from pyarrow.parquet import read_metadata

    if not parts and not blocks:
        return [*ROW_COLUMNS, *CELL_COLUMNS]
    names = (name for path in (*blocks, *parts) for name in read_metadata(path).schema.names)
    return [name for name in dict.fromkeys(names) if name not in OWN]


def read_frame(folder: Path, left_out: LeftOut = NOTHING) -> pd.DataFrame:
    """All rows that count, in the order of their blocks; empty if there are none."""

    def read(parts: list[Path], blocks: list[Path]) -> pd.DataFrame:
        return _read_frame(parts, blocks, left_out.blocks)

    return settled(folder, left_out, read)


def score_table(folder: Path, left_out: LeftOut = NOTHING) -> tuple[ScoreTable, frozenset[str]]:
    """The same rows by metric, and the columns that the files have.

    ValueError or OSError where a file cannot be read; the columns may lack some that are needed,
    and then there are no rows.
    """

    def read(parts: list[Path], blocks: list[Path]) -> tuple[ScoreTable, frozenset[str]]:
        return _score_table(parts, blocks, left_out.blocks)

    return settled(folder, left_out, read)


def settled(folder: Path, left_out: LeftOut, read: Callable[[list[Path], list[Path]], T]) -> T:
    """Read a folder again if files went while it was read: they were compacted, or a block was
    written again."""
    for _ in range(TRIES):
        try:
            return read(*left_out.files_left(folder))
        except FileNotFoundError:
            continue
    return read(*left_out.files_left(folder))


# as a table of rows -------------------------------------------------------------------------------


def _read_frame(parts: list[Path], blocks: list[Path], left_out: frozenset[int]) -> pd.DataFrame:
    if not parts and not blocks:
        return pd.DataFrame(columns=[*ROW_COLUMNS, *CELL_COLUMNS])
    frames = [pd.read_parquet(path) for path in blocks]
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*KEYS])
    sizes = [len(frame) for frame in frames]
    block = np.repeat([int(path.stem) for path in blocks], sizes).astype(np.int64)
    row = np.concatenate([np.arange(size) for size in sizes]) if sizes else np.arange(0)
    if {*KEYS, "status"} <= set(rows):
        counting = ~superseded(rows, np.repeat(np.arange(len(frames)), sizes))
        rows, block, row = rows[counting].reset_index(drop=True), block[counting], row[counting]
    if not parts:
        return rows
    pieces, places = [rows] if len(rows) else [], [(block, row)]
    taken = set(rows["image_id"])
    for path in reversed(parts):
        frame, block, row = part_frame(path)
        kept = ~frame["image_id"].isin(taken).to_numpy() & ~np.isin(block, [*left_out])
        taken |= set(frame.loc[kept, "image_id"])
        pieces.append(frame[kept])
        places.append((block[kept], row[kept]))
    whole = pd.concat(pieces, ignore_index=True)
    block, row = (np.concatenate(of_pieces) for of_pieces in zip(*places, strict=True))
    return whole.iloc[_order(whole["image_id"], block, row)].reset_index(drop=True)


def _order(
    image_ids: pd.Series[str], block: NDArray[np.int64], row: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Rows by block, and the images of a block by where they begin in it, each with all its rows:
    places are of several files where some of a block's images were kept when it was done again."""
    image, ids = pd.factorize(image_ids)
    first = np.full(len(ids), np.iinfo(np.int64).max)
    np.minimum.at(first, image, row)
    return np.lexsort((row, image, first[image], block))


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


def _score_table(
    parts: list[Path], blocks: list[Path], left_out: frozenset[int]
) -> tuple[ScoreTable, frozenset[str]]:
    tables: list[ScoreTable] = []
    columns: frozenset[str] = frozenset()
    if blocks or not parts:
        rows, columns = _read_narrow(blocks)
        if not set(ROW_COLUMNS) <= columns and blocks:
            return MemoryTable(_nothing()), columns
        tables.append(MemoryTable(rows))
    for path in reversed(parts):
        part = PartTable(path)
        tables.append(_without(part, left_out))
        columns |= part.columns
    return (tables[0] if len(tables) == 1 else JoinedTable(tables)), columns


def _without(part: PartTable, blocks: frozenset[int]) -> ScoreTable:
    """The part without the images of these blocks."""
    if not blocks:
        return part
    rows = part.image_rows(("block",))
    kept = rows.loc[~rows["block"].isin(blocks), "image_id"]
    return part if len(kept) == len(rows) else JoinedTable([part], Images.of(kept))


def _nothing() -> pd.DataFrame:
    return pd.DataFrame(columns=list(NARROW)).astype({"value": float})


def _read_narrow(blocks: Sequence[Path]) -> tuple[pd.DataFrame, frozenset[str]]:
    """The columns that scores need of all block files, and the names of all that the files have."""
    import pyarrow as pa

    tables = []
    names: frozenset[str] = frozenset(ROW_COLUMNS) if not blocks else frozenset()
    for path in blocks:
        with open_rows(path, words={*NARROW} - {"value"}) as file:
            in_file = file.metadata.schema.names
            table = file.read([n for n in NARROW if n in in_file], use_threads=False)
        names |= {*in_file}
        if set(ROW_COLUMNS) <= names:
            check_values(table)
        tables.append(table)
    if not set(ROW_COLUMNS) <= names or not tables:
        return _nothing(), names
    whole = pa.concat_tables(tables, promote_options="permissive")
    rows = whole.unify_dictionaries().to_pandas(strings_to_categorical=True)
    file_of_row = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return rows[~superseded(rows, file_of_row)], names
