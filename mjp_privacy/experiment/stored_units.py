"""Which images have rows in a cell's files, and which code made them; read without their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import NOT_DONE


class StoredUnit(NamedTuple):
    """An image whose rows are in a file."""

    image_id: str
    block: int
    failed: bool  # or its file could not be read, so that it is to be done again
    code: str  # the digest of the code that made it; "" if it was not recorded


def read_units(files: Sequence[Path]) -> Iterator[StoredUnit]:
    """The images in these files of rows, once for each file that they are in."""
    from pyarrow.parquet import ParquetFile

    for path in files:
        try:
            columns = ParquetFile(path).read(columns=["image_id", "status", "code"]).to_pydict()
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise UserError(
                f"The rows in {path} cannot be read ({error}). Delete that file and run the attack "
                "again; only this block is computed again."
            ) from error
        ids, statuses = columns["image_id"], columns["status"]
        codes = columns.get("code", [None] * len(ids))
        failed = {name for name, status in zip(ids, statuses, strict=True) if status in NOT_DONE}
        for image_id, code in dict(zip(ids, codes, strict=True)).items():
            yield StoredUnit(image_id, int(path.stem), image_id in failed, code or "")
