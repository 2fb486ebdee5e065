"""How long stages took, read from a run's timings.jsonl, which may have millions of lines."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pandas as pd

NUMBERS = {"seconds": "d", "images": "q"}


def read_timings(path: Path) -> pd.DataFrame:
    """The lines as a table, all but the numbers as categories; lines that are cut off are left out.

    A line takes some twenty bytes in memory, where a dictionary for each would take 600.
    """
    numbers = {name: array(kind) for name, kind in NUMBERS.items()}
    words: dict[str, dict[Any, int]] = {}
    codes: dict[str, array[int]] = {}
    count = 0
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            for text in file:
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
    categories = {
        name: pd.Categorical.from_codes(list(column), categories=pd.Index(list(words[name])))
        for name, column in codes.items()
    }
    categories = {n: c.reorder_categories(sorted(c.categories)) for n, c in categories.items()}
    return pd.DataFrame({**categories, **{name: list(known) for name, known in numbers.items()}})
