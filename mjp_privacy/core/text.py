"""Words of strangers on a terminal: a file's name can hold escape codes, or be a page long."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories that are escaped: control characters, direction marks, lone surrogates."""


def shown(text: object, limit: int = 300) -> str:
    """The text in one line of characters that a terminal only draws, with its middle left out
    where it is long: shown("a\\x1b[2Jb") == "a\\\\x1b[2Jb"."""
    return cut(plain(str(text)), limit)


def plain(text: str, keep: str = "") -> str:
    """The text with invisible characters escaped; keep: characters such as a line's end."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter
        if letter in keep or unicodedata.category(letter) not in INVISIBLE
        else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, the first and the last ones."""
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def first_of(names: Sequence[object], most: int) -> str:
    """The first names: first_of(["a", "b", "c"], 2) == "a, b, …"."""
    return ", ".join(map(str, names[:most])) + (", …" if len(names) > most else "")


def counted(number: int, noun: str) -> str:
    """A number with its noun: counted(1, "image") is "1 image", counted(3, "image") "3 images"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason, with the names of all that it keeps from something."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return [f"not {', '.join(alike)}: {why}" for why, alike in names.items()]


def one_line(error: BaseException, limit: int = 300) -> str:
    """What an error says, in one line; nothing where its own text fails."""
    try:
        return shown(" ".join(str(error).split()), limit)
    except Exception:
        return ""


def first_line(error: BaseException) -> str:
    """What an error's text begins with, as the end of a sentence: ": no such key", or nothing."""
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:
        return ""
    return f": {shown(lines[0].rstrip('.'), 200)}" if lines else ""


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")


def formula_free(cell: Any) -> Any:
    """A cell that no spreadsheet computes: formula_free("=1+1") == "'=1+1".

    A file named `=HYPERLINK("http://…")` is a photograph here and a formula there. It gets a `'`,
    as spreadsheets themselves mark a text; numbers stay as they are. Tables that are read again by
    their names (label files, a run's own) are left exact.
    """
    if not isinstance(cell, str) or not cell.startswith(FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
