"""Names of files as image ids: text that every table, file name and terminal can hold.

    named_by_id(["a.jpg", "b\\x1b.jpg"])    {"a.jpg": "a.jpg", "b%1B~55ae8bdd.jpg": "b\\x1b.jpg"}

Nearly every name is its own id. In one that is no Unicode, holds control characters or is a page
long these are written as %XX, or its middle is left out, and a hash tells it from every other.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath

LONGEST = 512
"""Characters of an id."""

LONGEST_PART = 255
"""Bytes between two slashes: so much is the name of a file on nearly every disk."""

UNUSABLE = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories: control characters, bytes that are no Unicode, ends of lines."""


def named_by_id(names: Iterable[str]) -> dict[str, str]:
    """The name behind each id, in the order of the ids."""
    names = set(names)
    usable = {name for name in names if is_usable(name)}
    by_id = {name: name for name in usable}
    for name in sorted(names - usable):
        image_id, tries = _escaped(name, ""), 1
        while image_id in by_id:  # somebody named a file like the id of another
            image_id, tries = _escaped(name, f"-{tries}"), tries + 1
        by_id[image_id] = name
    return dict(sorted(by_id.items()))


def is_usable(name: str) -> bool:
    """Whether a name can be an id as it stands."""
    if len(name) > LONGEST or any(map(_is_long, name.split("/"))):
        return False
    if name.isascii() and name.isprintable():
        return True
    return not any(map(_is_unusable, name))


def _is_unusable(letter: str) -> bool:
    return unicodedata.category(letter) in UNUSABLE


def _escaped(name: str, mark: str) -> str:
    """The name with its unusable characters as %XX, and a hash before its ending."""
    content = name.encode("utf-8", "surrogateescape" if _is_of_bytes(name) else "surrogatepass")
    digest = hashlib.sha256(content).hexdigest()[:8]
    text = "".join(_percent(letter) if _is_unusable(letter) else letter for letter in name)
    *folders, last = text.split("/")
    suffix = PurePosixPath(last).suffix[:16]
    stem = last.removesuffix(suffix)
    short = [_cut(part) for part in folders]
    if len("/".join(short)) > LONGEST // 2:
        short = short[:1]
    return "/".join([*short, f"{_cut(stem)}~{digest}{mark}{suffix}"])


def _is_long(part: str) -> bool:
    return len(part) * 4 > LONGEST_PART and len(part.encode("utf-8", "replace")) > LONGEST_PART


def _cut(part: str) -> str:
    """The part itself, or its beginning: letters are up to four bytes long."""
    return part[:48] if len(part) > 48 else part


def _is_of_bytes(name: str) -> bool:
    """Whether every lone surrogate in it stands for a byte, as Python reads names from a disk."""
    return all(
        "\udc80" <= letter <= "\udcff" for letter in name if unicodedata.category(letter) == "Cs"
    )


def _percent(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":
        return f"%{ord(letter) - 0xDC00:02X}"
    return "".join(f"%{byte:02X}" for byte in letter.encode("utf-8", "surrogatepass"))
