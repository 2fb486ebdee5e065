"""How long stages took, read from a run's timings.jsonl, which may have millions of lines."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from mjp_privacy.core.checked_lines import JSON_LINES
from mjp_privacy.core.read import FileKind, is_there

TIMINGS = FileKind("the times of a run's stages", "Delete the file; no figure needs it.", 1 << 40)
PIECE = 32 << 20
"""Bytes that are read at a time."""

CHECK = "check"
"""The field of a line that is its checksum."""

NUMBERS = {"seconds": "float64", "images": "int64"}


@dataclass(frozen=True)
class Timings:
    """What timings.jsonl holds: Timings.read(path, checked=True).table."""

    table: pd.DataFrame  # all columns but the numbers are categories
    damaged: int = 0  # number of lines that changed after they were written
    unchecked: int = 0  # number of lines of an earlier version, without a checksum

    @classmethod
    def read(cls, path: Path, *, checked: bool) -> Timings:
        """The whole lines of the file; none if there is no file.

        A line takes some twenty bytes in memory, where a dictionary for each would take 600.

        checked: whether lines without a checksum are damaged; earlier versions wrote none
        """
        tables, damaged, unchecked = [], 0, 0
        for content in _pieces(path):
            lines = JSON_LINES.read(content, needed=checked)
            damaged += lines.damaged
            unchecked += lines.unchecked
            table = _as_one(b"\n".join(lines.bodies) if lines.damaged else content)
            tables.append(_line_by_line(lines.texts) if table is None else table)
        return cls(_joined(tables), damaged, unchecked)


def append_timing(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line."""
    JSON_LINES.append(path, [json.dumps(record)])


def tidy_timings(path: Path, *, checked: bool) -> int:
    """Write the file anew with its whole lines alone, each with a checksum; the number of lines
    that were damaged, and are gone now."""
    kept: list[str] = []
    damaged = 0
    for content in _pieces(path):
        lines = JSON_LINES.read(content, needed=checked)
        whole = [text for text in lines.texts if _is_timing(text)]
        damaged += lines.damaged + len(lines.texts) - len(whole)
        kept += whole
    JSON_LINES.rewrite(path, "", kept)
    return damaged


def _is_timing(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _pieces(path: Path) -> Iterator[bytes]:
    """The file in pieces of whole lines; what a killed process left of a last one is left out."""
    if not is_there(path):
        return
    TIMINGS.check(path)
    with TIMINGS.reading(path), path.open("rb") as file:
        while lines := file.readlines(PIECE):
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            yield b"".join(lines)


def _joined(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables with the same columns as one, words as sorted categories."""
    tables = [table for table in tables if len(table)]
    if len(tables) < 2:
        return tables[0] if tables else pd.DataFrame()
    names = dict.fromkeys(name for table in tables for name in table.columns)
    words = [name for name in names if name not in NUMBERS]
    columns: dict[str, Any] = {}
    for name in words:
        of_tables: list[Any] = [table[name].array for table in tables if name in table]
        kinds = {part.categories.dtype for part in of_tables}
        if len(of_tables) == len(tables) and len(kinds) == 1:
            columns[name] = union_categoricals(of_tables, sort_categories=True)
            continue
        columns[name] = pd.Categorical(
            [word for t in tables for word in (t[name] if name in t else [None] * len(t))]
        )
    numbers = {name: np.concatenate([table[name] for table in tables]) for name in NUMBERS}
    return pd.DataFrame(columns | numbers)


def _as_one(content: bytes) -> pd.DataFrame | None:
    """The table by pyarrow's reader, a tenth of the time; None where a line is not like the others:
    cut off, without one of the numbers, or with another kind of value."""
    import pyarrow as pa
    from pyarrow.json import ReadOptions, read_json

    try:
        options = ReadOptions(use_threads=False)
        table = read_json(pa.BufferReader(content), read_options=options)
    except pa.ArrowInvalid:
        return None
    is_number = (pa.types.is_floating, pa.types.is_integer)
    numeric = [f.name for f in table.schema if any(test(f.type) for test in is_number)]
    numbers = {name: table[name] for name in NUMBERS if name in numeric}
    if len(numbers) < len(NUMBERS) or any(column.null_count for column in table.columns):
        return None
    if any(pa.types.is_nested(kind) or pa.types.is_timestamp(kind) for kind in table.schema.types):
        return None
    columns: dict[str, Any] = {}
    for name in table.column_names:
        if name not in (*NUMBERS, CHECK):
            coded = table[name].combine_chunks().dictionary_encode()
            columns[name] = _categories(coded.indices.to_numpy(), coded.dictionary.to_pylist())
    values = {name: numbers[name].to_numpy().astype(kind) for name, kind in NUMBERS.items()}
    return pd.DataFrame(columns | values)


def _line_by_line(lines: Iterable[str]) -> pd.DataFrame:
    """The same for lines that differ from each other."""
    numbers: dict[str, array[Any]] = {"seconds": array("d"), "images": array("q")}
    words: dict[str, dict[Any, int]] = {}
    codes: dict[str, array[int]] = {}
    count = 0
    for text in lines:
        try:
            line = json.loads(text)
            seconds, images = float(line.pop("seconds", 0)), int(line.pop("images", 0))
            if not all(isinstance(word, (str, int, float)) for word in line.values()):
                continue
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
        numbers["seconds"].append(seconds)
        numbers["images"].append(images)
        for name, word in line.items():
            if name not in words:
                words[name], codes[name] = {}, array("i", [-1] * count)
            known = words[name]
            codes[name].append(known.setdefault(word, len(known)))
        count += 1
        for column in codes.values():
            if len(column) < count:
                column.append(-1)
    if not count:
        return pd.DataFrame()
    columns = {name: _categories(np.array(codes[name]), list(words[name])) for name in codes}
    return pd.DataFrame(columns | {name: np.array(known) for name, known in numbers.items()})


def _categories(codes: Any, words: list[Any]) -> pd.Categorical:
    """Words by their codes, as sorted categories."""
    known = pd.Categorical.from_codes(codes, categories=pd.Index(words))
    return known.reorder_categories(sorted(words, key=lambda word: (str(type(word)), word)))
