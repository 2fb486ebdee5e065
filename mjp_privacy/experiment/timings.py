"""How long stages took, read from a run's timings.jsonl, which may have millions of lines."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

NUMBERS = {"seconds": "float64", "images": "int64"}


def read_timings(path: Path) -> pd.DataFrame:
    """The lines as a table, all but the numbers as categories; lines that are cut off are left out.

    A line takes some twenty bytes in memory, where a dictionary for each would take 600.
    """
    if not path.is_file() or not path.stat().st_size:
        return pd.DataFrame()
    whole = _whole_file(path)
    if whole is not None:
        return whole
    with path.open(encoding="utf-8") as file:
        return _line_by_line(file)


def _whole_file(path: Path) -> pd.DataFrame | None:
    """The table by pyarrow's reader, a tenth of the time; None where a line is not like the others:
    cut off, without one of the numbers, or with another kind of value."""
    import pyarrow as pa
    from pyarrow.json import ReadOptions, read_json

    try:
        table = read_json(path, read_options=ReadOptions(use_threads=False))
    except pa.ArrowInvalid:
        return None
    numbers = {name: table[name] for name in NUMBERS if name in table.column_names}
    if len(numbers) < len(NUMBERS) or any(column.null_count for column in table.columns):
        return None
    if any(pa.types.is_nested(kind) or pa.types.is_timestamp(kind) for kind in table.schema.types):
        return None
    columns: dict[str, Any] = {}
    for name in table.column_names:
        if name not in NUMBERS:
            coded = table[name].combine_chunks().dictionary_encode()
            columns[name] = _categories(coded.indices.to_numpy(), coded.dictionary.to_pylist())
    values = {name: numbers[name].to_numpy().astype(kind) for name, kind in NUMBERS.items()}
    return pd.DataFrame(columns | values)


def _line_by_line(lines: Iterable[str]) -> pd.DataFrame:
    numbers: dict[str, array[Any]] = {"seconds": array("d"), "images": array("q")}
    words: dict[str, dict[Any, int]] = {}
    codes: dict[str, array[int]] = {}
    count = 0
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        for name in NUMBERS:
            numbers[name].append(line.pop(name, 0))
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
    return known.reorder_categories(sorted(words))
