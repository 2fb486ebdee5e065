"""Tables of text from outside: every column once, every cell of a bearable length."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from mjp_privacy.core.gate.file_kind import FileKind
from mjp_privacy.core.shown import shown

MOST_LETTERS = 4096
"""Characters in one cell of a table."""


def read_csv(
    path: Path, kind: FileKind, needed: Collection[str] = (), known: Collection[str] = ()
) -> list[dict[str, str]]:
    """The rows of a CSV by column; the first line names the columns.

    needed  columns that have to be there
    known   with it, columns of any other name are refused
    """
    return list(csv_rows(kind.text(path), path, kind, needed, known))


def csv_rows(
    text: str,
    path: Path,
    kind: FileKind,
    needed: Collection[str] = (),
    known: Collection[str] = (),
) -> Iterator[dict[str, str]]:
    """The same of a text that was read already."""
    return (row for _, row in numbered_rows(text, path, kind, needed, known))


def numbered_rows(
    text: str,
    path: Path,
    kind: FileKind,
    needed: Collection[str] = (),
    known: Collection[str] = (),
    *,
    column: Callable[[str], str] = str,
) -> Iterator[tuple[int, dict[str, str]]]:
    """Every row with the number of its line.

    column  what a column is called, from its name in the first line: `str.lower` where upper and
            lower case are the same
    """
    if "\0" in text:
        raise kind.refusal(path, "a zero byte, which no text holds")
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    with kind.reading(path):
        columns = [column(name) for name in next(lines, [])]
    _check_columns(columns, path, kind, needed, known)
    while True:
        with kind.reading(path):
            cells = next(lines, None)
        if cells is None:
            return
        if not cells:  # an empty line
            continue
        place = f"line {lines.line_num}"
        if len(cells) != len(columns):
            raise kind.refusal(path, f"{len(cells)} cells under {len(columns)} columns", place)
        longest = max(map(len, cells))
        if longest > MOST_LETTERS:
            raise kind.refusal(path, f"a cell of {longest} characters", place)
        yield lines.line_num, dict(zip(columns, cells, strict=True))


def _check_columns(
    columns: list[str], path: Path, kind: FileKind, needed: Collection[str], known: Collection[str]
) -> None:
    twice = sorted(name for name, count in Counter(columns).items() if count > 1)
    if twice:
        raise kind.refusal(path, f"the column {shown(twice[0])} twice", "line 1")
    missing = [name for name in needed if name not in columns]
    if missing:
        got = ", ".join(columns) or "none"
        raise kind.refusal(path, f"no column {', '.join(missing)} among {shown(got)}", "line 1")
    strange = [name for name in columns if known and name not in known]
    if strange:
        raise kind.refusal(path, f"the unknown column {shown(strange[0])}", "line 1")
