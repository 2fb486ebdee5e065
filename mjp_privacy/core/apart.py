"""What a command writes must lie apart from what it reads, or the next run reads its own output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.shown import shown


def keep_apart(
    out: str | Path, inputs: Mapping[str, str | Path | None], *, around: bool = False
) -> None:
    """Raise where the output is an input, or one of the two lies inside the other.

    keep_apart("photos/run", {"--images": "photos"})  # refused

    inputs  what is read, by the option that names it; None, or a word such as `embedded` in place
            of a path, is no place
    around  inputs may lie inside `out`: what is written there has names that are nobody else's
    """
    where = os.path.realpath(out)
    for option, given in inputs.items():
        if given is None or not _is_there(given):
            continue
        source = os.path.realpath(given)
        if where == source:
            fault = f"is {option} itself"
        elif _lies_in(where, source):
            fault = f"lies inside {option} {shown(given)}: what is written there would be read"
        elif not around and Path(source).is_dir() and _lies_in(source, where):
            fault = f"holds {option} {shown(given)}: what is written would stand around it"
        else:
            continue
        raise UserError(
            f"--out {shown(out)} {fault}. Expected a place of its own: give another --out, beside "
            "what is read."
        )


def _is_there(path: str | Path) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _lies_in(inner: str, outer: str) -> bool:
    return inner.startswith(outer.rstrip(os.sep) + os.sep)
