"""Which images have rows in a cell's files, and which code made them; read without their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attacks.budget import seconds_in
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.open_rows import open_rows
from mjp_privacy.experiment.part_file import PartTable, gone
from mjp_privacy.experiment.row_columns import NOT_DONE


class StoredUnit(NamedTuple):
    """An image whose rows are in a file."""

    image_id: str
    block: int
    failed: bool  # or its file could not be read, so that it is to be done again
    code: str  # the digest of the code that made it; "" if it was not recorded
    late: float = 0.0  # seconds after which the attack was ended here; 0: it was not


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
    except FileNotFoundError as error:
        raise gone(path) from error
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        again = "this block is" if path.stem.isdigit() else "the blocks in it are"
        raise UserError(
            f"The rows in {path} cannot be read ({error}). Delete that file and run the attack "
            f"again; only {again} computed again."
        ) from error


def _units_of_block(path: Path) -> list[StoredUnit]:
    with open_rows(path, words=("image_id", "reason")) as file:
        names = file.metadata.schema.names
        columns = [n for n in ("image_id", "status", "reason", "code") if n in names]
        table = file.read(columns, use_threads=False).combine_chunks()
    images = table["image_id"].chunk(0)
    names, place = images.dictionary.to_pylist(), images.indices.to_numpy()
    statuses = np.array(table["status"].to_pylist(), dtype=object)
    failed = set(place[np.isin(statuses, NOT_DONE)].tolist())
    _, first = np.unique(place, return_index=True)
    first.sort()
    codes = table["code"].take(first).to_pylist() if "code" in columns else [None] * len(first)
    late = _late(table["reason"].chunk(0), place)
    block = int(path.stem)
    return [
        StoredUnit(names[at], block, at in failed, code or "", late.get(at, 0.0))
        for at, code in zip(place[first].tolist(), codes, strict=True)
    ]


def _units_of_part(path: Path) -> list[StoredUnit]:
    part = PartTable(path)
    rows = part.image_rows(("block", "done", "code"))
    codes = rows["code"].fillna("").tolist() if "code" in rows else [""] * len(rows)
    blocks, done = rows["block"].tolist(), rows["done"].tolist()
    late = _late_in_part(part)
    seconds = [late.get(unit, 0.0) for unit in rows["unit"].tolist()]
    columns = rows["image_id"], blocks, done, codes, seconds
    return [
        StoredUnit(image, block, not of_image, code, seconds)
        for image, block, of_image, code, seconds in zip(*columns, strict=True)
    ]


def _late_in_part(part: PartTable) -> dict[int, float]:
    """The same of a part, by unit. Any metric may say it: where scores are `unscored` these name
    another reason, and diagnostics alone say that the attack was ended."""
    late: dict[int, float] = {}
    for unit, reasons in part.words("reason"):
        seconds = np.array([seconds_in(word) for word in reasons.words])
        of_row = seconds[reasons.codes]
        ended = np.flatnonzero(of_row)
        late |= dict(zip(unit[ended].tolist(), of_row[ended].tolist(), strict=True))
    return late


def _late(reasons: Any, place: NDArray[np.int64]) -> dict[int, float]:
    """Places of images whose rows say that the attack was ended, with the seconds that it had."""
    words = [seconds_in(word or "") for word in reasons.dictionary.to_pylist()]
    if not any(words):
        return {}
    rows = reasons.indices.to_pylist()
    return {
        int(at): words[word]
        for at, word in zip(place, rows, strict=True)
        if word is not None and words[word]
    }
