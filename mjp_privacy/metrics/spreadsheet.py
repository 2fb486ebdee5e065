"""Texts in tables that people open with a spreadsheet: it runs a cell that begins like a formula.

A file named `=HYPERLINK("http://…")` is a photograph here and a formula there. So a text that
begins with one of STARTS gets a `'` before it, as spreadsheets themselves mark a text; numbers stay
as they are. Tables that are read again by their names (label files, a run's own) are left exact.
"""

from __future__ import annotations

STARTS = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")


def formula_free(text: str) -> str:
    """A text as a cell that no spreadsheet computes: formula_free("=1+1") == "'=1+1"."""
    if not text.startswith(STARTS) or _is_number(text):
        return text
    return f"'{text}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
