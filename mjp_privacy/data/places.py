"""Where a command reads and writes, looked at before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.data.embedded import EMBEDDED
from mjp_privacy.data.files import from_home, place_of
from mjp_privacy.data.flat_pictures import FLAT


def check_place(path: str | Path | None) -> None:
    """Raise the UserError of `open_images` where there is no folder or zip. No path, an empty one
    and the words `embedded` and `flat` pass: `open_images` deals with them."""
    if path is not None and str(path).strip() and str(path) not in (EMBEDDED, FLAT):
        place_of(from_home(path))


def keep_apart(
    out: str | Path, inputs: Mapping[str, str | Path | None], *, around: bool = False
) -> None:
    """Raise where the output is an input, or one of the two lies inside the other: the next run
    would read its own output. keep_apart("photos/run", {"--images": "photos"}) is refused.

    inputs  what is read, by the option that names it; None, or a word such as `embedded` in place
            of a path, is no place
    around  inputs may lie inside `out`: what is written there has names that are nobody else's
    """
    where = Path(os.path.realpath(out))
    for option, given in inputs.items():
        try:
            source = Path(given or "").expanduser().resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            continue  # nothing is there
        if given is None:
            continue
        if where == source:
            fault = f"is {option} itself"
        elif where.is_relative_to(source):
            fault = f"lies inside {option} {shown(given)}: what is written there would be read"
        elif not around and source.is_dir() and source.is_relative_to(where):
            fault = f"holds {option} {shown(given)}: what is written would stand around it"
        else:
            continue
        raise UserError(
            f"--out {shown(out)} {fault}. Expected a place of its own: give another --out, beside "
            "what is read."
        )
