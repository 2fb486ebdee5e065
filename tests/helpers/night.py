"""Rows of a table that are tried by `make nightly` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(*values: Any, **named: Any) -> Any:
    """One such row, in the words of pytest.param."""
    return pytest.param(*values, marks=pytest.mark.nightly, **named)


def by_day(rows: Iterable[Any], places: Collection[int]) -> list[Any]:
    """The rows, of which those at these places are tried by `make test` too."""
    found = [row if isinstance(row, tuple) else (row,) for row in rows]
    assert max(places) < len(found)
    return [pytest.param(*row) if at in places else nightly(*row) for at, row in enumerate(found)]
