"""An error of somebody's code in one line that says where it happened: for rows and messages.

    blamed(error)   "RuntimeError: sizes do not match (attacks/mine.py:12)"

The line is the same on every machine; the traceback of the error is for logs.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from mjp_privacy.core.shown import shown

INSTALLED = ("site-packages", "dist-packages")
OURS = ("attacks", "mjp_privacy")
LONGEST = 200  # characters of what an error says


def blamed(error: BaseException) -> str:
    """The error's class, the first line of what it says, and the place in the code that it is the
    fault of: the innermost line that is no library's."""
    said = shown(_first_line(error), LONGEST)
    kind = type(error).__name__
    return f"{kind}: {said}{_place(error)}" if said else f"{kind}{_place(error)}"


def trace(error: BaseException) -> str:
    """The traceback as Python shows it."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _first_line(error: BaseException) -> str:
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # an error whose own text fails
        return ""
    return lines[0].rstrip(".") if lines else ""


def _place(error: BaseException) -> str:
    """ " (attacks/mine.py:12)", or nothing where no line is known."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_name(Path(error.filename))}:{error.lineno})"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
    paths = [Path(frame.f_code.co_filename) for frame in frames]
    own = [at for at, path in enumerate(paths) if not _is_library(path.parts)]
    if not own:
        return ""
    return f" ({_name(paths[own[-1]])}:{lines[own[-1]]})"


def _is_library(parts: Sequence[str]) -> bool:
    """Whether a file belongs to Python or to an installed package other than this one."""
    installed = [at for at, part in enumerate(parts) if part in INSTALLED]
    if installed:
        return parts[installed[-1] + 1] not in OURS
    if parts and parts[0].startswith("<"):  # <string>, <frozen importlib>
        return True
    return any(part == "lib" and after.startswith("python") for part, after in pairwise(parts))


def _name(path: Path) -> str:
    """A file by the last folder it is in: attacks/mine.py."""
    return "/".join(path.parts[-2:])
