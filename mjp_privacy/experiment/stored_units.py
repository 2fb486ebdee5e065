"""Which images have rows in a cell's files, and which code made them; read without their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.part_file import PartTable
from mjp_privacy.experiment.row_columns import NOT_DONE


class StoredUnit(NamedTuple):
    """An image whose rows are in a file."""

    image_id: str
    block: int
    failed: bool  # or its file could not be read, so that it is to be done again
    code: str  # the digest of the code that made it; "" if it was not recorded


def read_units(parts: Sequence[Path], blocks: Sequence[Path]) -> Iterator[StoredUnit]:
    """The images in these files of rows, once for each block that holds rows of them that count.

    What is in a block's file counts before what is in a part, as for whoever reads the rows.
    """
    taken: set[str] = set()
    for path in blocks:
        for unit in _checked(path, _units_of_block):
            taken.add(unit.image_id)
            yield unit
    for path in reversed(parts):
        units = [unit for unit in _checked(path, _units_of_part) if unit.image_id not in taken]
        taken |= {unit.image_id for unit in units}
        yield from units


def _checked(path: Path, read: Callable[[Path], list[StoredUnit]]) -> list[StoredUnit]:
    try:
        return read(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        again = "this block is" if path.stem.isdigit() else "the blocks in it are"
        raise UserError(
            f"The rows in {path} cannot be read ({error}). Delete that file and run the attack "
            f"again; only {again} computed again."
        ) from error


def _units_of_block(path: Path) -> list[StoredUnit]:
    from pyarrow.parquet import ParquetFile, read_metadata

    metadata = read_metadata(path)
    columns = [n for n in ("image_id", "status", "code") if n in metadata.schema.names]
    with ParquetFile(path, metadata=metadata, read_dictionary=["image_id"]) as file:
        table = file.read(columns, use_threads=False).combine_chunks()
    images = table["image_id"].chunk(0)
    names, place = images.dictionary.to_pylist(), images.indices.to_numpy()
    statuses = np.array(table["status"].to_pylist(), dtype=object)
    failed = set(place[np.isin(statuses, NOT_DONE)].tolist())
    _, first = np.unique(place, return_index=True)
    first.sort()
    codes = table["code"].take(first).to_pylist() if "code" in columns else [None] * len(first)
    block = int(path.stem)
    return [
        StoredUnit(names[at], block, at in failed, code or "")
        for at, code in zip(place[first].tolist(), codes, strict=True)
    ]


def _units_of_part(path: Path) -> list[StoredUnit]:
    rows = PartTable(path).image_rows(("block", "done", "code"))
    codes = rows["code"].fillna("").tolist() if "code" in rows else [""] * len(rows)
    blocks, done = rows["block"].tolist(), rows["done"].tolist()
    return [
        StoredUnit(image, block, not of_image, code)
        for image, block, of_image, code in zip(rows["image_id"], blocks, done, codes, strict=True)
    ]
