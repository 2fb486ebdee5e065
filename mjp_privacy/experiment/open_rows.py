"""Opens a file of rows that a run may replace meanwhile.

    with open_rows(path) as rows:
        rows.metadata, rows.read(["image_id"])       both of the same file

A run writes a block's rows into a new file that then takes the old one's name, and other processes
read them at that moment. Whoever opens the path twice, for the metadata and for the rows, may meet
two files that do not fit, which looks like damage. Here a path is opened once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData, ParquetFile

Stamp = tuple[int, int, int]
"""A file's number, size and time of its last change: two files differ in at least one of them."""


class Replaced(FileNotFoundError):
    """The file of that name is another one by now."""


@contextmanager
def open_rows(
    path: Path,
    words: Collection[str] = (),
    *,
    known: tuple[Stamp, FileMetaData] | None = None,
) -> Iterator[ParquetFile]:
    """The file, open until the block ends.

    words: columns of text to read as categories; the file may lack some of them
    known: what `stamp_and_metadata` said of it before; Replaced if it is another file now
    """
    from pyarrow.parquet import ParquetFile, read_metadata

    with _opened(path) as file:
        if known is not None and known[0] != stamp(os.fstat(file.fileno())):
            raise Replaced(path)
        metadata = read_metadata(file) if known is None else known[1]
        having = [name for name in metadata.schema.names if name in words]
        with ParquetFile(file, metadata=metadata, read_dictionary=having) as rows:
            yield rows


def stamp_and_metadata(path: Path) -> tuple[Stamp, FileMetaData]:
    """The stamp and the metadata of a file whose rows are read later."""
    from pyarrow.parquet import read_metadata

    with _opened(path) as file:
        return stamp(os.fstat(file.fileno())), read_metadata(file)


def stamp(status: os.stat_result) -> Stamp:
    """The stamp of the file that this status is of."""
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file, opened once. Replaced where another machine took it away from under the reader,
    which a network file system says as a stale handle."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise Replaced(path) from error
        raise
