"""The file of one block's rows, and what it says of itself.

It is an ordinary parquet file. Its metadata hold the seal of the file (`core/sealed`), and under
`mjp_privacy.pictures` the digest of the file of pictures that these rows belong to, by the number
of the block: {"3": "9f31…"}, or {} where the block has no pictures. A part (`part_file`) has the
same for all of its blocks. Pictures that are older or newer than their rows are noticed by it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mjp_privacy.core.read import FileKind
from mjp_privacy.core.sealed import BLANK, DIGITS, PARQUET, write_sealed
from mjp_privacy.experiment.row_columns import ROW_COLUMNS, STATUSES

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

ROWS = FileKind("a run's rows", "Run the attack again, which makes them again.", 1 << 50)

SEAL = "mjp_privacy.seal"
PICTURES = "mjp_privacy.pictures"


def write_block(path: Path, rows: pd.DataFrame, pictures: Mapping[int, str]) -> None:
    """Write a block's rows, as a finished block: the file is on the disk when this returns.

    pictures: the digest of the block's file of pictures, by the number of the block
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    table = pa.Table.from_pandas(rows, preserve_index=False)

    def write(temporary: Path) -> None:
        with ParquetWriter(temporary, table.schema) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(own_metadata(pictures))

    write_sealed(path, write)


def own_metadata(pictures: Mapping[int, str]) -> dict[str, str]:
    """The entries of a parquet file's metadata: a place for its seal, and its pictures."""
    by_block = {str(block): digest for block, digest in sorted(pictures.items())}
    return {PICTURES: json.dumps(by_block), SEAL: BLANK}


def named_pictures(path: Path) -> dict[int, str] | None:
    """The digests of the files of pictures that a file of rows names, by block; None where it is
    of an earlier version, which named none."""
    from pyarrow.parquet import read_metadata

    ROWS.check(path)
    with ROWS.reading(path):
        stored = (read_metadata(path).metadata or {}).get(PICTURES.encode())
        named = None if stored is None else json.loads(stored)
    if named is None:
        return None
    if not isinstance(named, dict) or not all(map(_is_digest, named, named.values())):
        raise ROWS.refusal(path, "no digests of pictures by block", PICTURES)
    return {int(block): digest for block, digest in named.items()}


def other_cell(path: Path, run_id: str) -> str:
    """The cell whose rows a file holds where that is another one than the folder's; "" if it is
    this one, or if the file does not tell."""
    from pyarrow.parquet import read_metadata

    with ROWS.reading(path):
        known = read_metadata(path)
        if "run_id" not in known.schema.names:
            return ""
        at = known.schema.names.index("run_id")
        for group in range(known.num_row_groups):
            statistics = known.row_group(group).column(at).statistics
            if statistics is not None and statistics.has_min_max:
                strange = [n for n in (statistics.min, statistics.max) if n != run_id]
                if strange:
                    return str(strange[0])
    return ""


def _is_digest(block: str, digest: object) -> bool:
    return block.isdecimal() and isinstance(digest, str) and len(digest) == DIGITS


def check_ends(path: Path) -> None:
    """UserError unless the file begins and ends as a parquet file does."""
    with ROWS.reading(path), path.open("rb") as file:
        begin = file.read(len(PARQUET))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(PARQUET)))
        end = file.read()
    if begin != PARQUET or end != PARQUET:
        raise ROWS.refusal(path, "a file that is cut off, or no parquet file at all")


def check_content(path: Path) -> None:
    """Raise ValueError or OSError unless all rows of the file can be read: for files of earlier
    versions, which have no seal."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        names = set(file.schema_arrow.names)
        check_columns(names)
        for group in range(file.num_row_groups):
            check_values(file.read_row_group(group, use_threads=False))


def check_columns(names: set[str] | frozenset[str]) -> None:
    """Raise ValueError unless these are a row's columns."""
    missing = [name for name in ROW_COLUMNS if name not in names]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}")


def check_values(table: pa.Table) -> None:
    """Raise ValueError where a row has no image, metric or variant, a status that is none of
    STATUSES, or a value that is no number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in ("image_id", "metric", "variant", "status"):
        if table[name].null_count:
            raise ValueError(f"{table[name].null_count} rows without {name}")
    kind = table["value"].type
    if not pa.types.is_floating(kind) and not pa.types.is_null(kind):  # null: none has a value
        raise ValueError(f"values of type {table['value'].type}")
    statuses = pc.unique(table["status"]).to_pylist()
    if strange := [word for word in statuses if word not in STATUSES]:
        raise ValueError(f"expected a status of {', '.join(STATUSES)}; got {strange[0]!r}")
