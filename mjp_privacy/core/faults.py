"""What becomes of an error that nobody expected: one line, and a file for whoever mends it."""

from __future__ import annotations

import os
import platform
import secrets
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from mjp_privacy.core.shown import shown

PACKAGES = ("mjp-privacy", "torch", "numpy", "pandas", "pyarrow", "safetensors", "pydantic")
"""Whose versions a report holds."""


def fault_line(error: BaseException, words: Sequence[str]) -> str:
    """The line that says so; the traceback goes into a file that the line names, or onto the
    console where no file can be written.

    words    the command line. Nothing of the environment is kept.
    """
    kind, said = type(error).__name__, shown(_text(error))
    what = f"a fault of mjp-privacy, please report: {kind}{f': {said}' if said else ''}"
    report = _report(error, words)
    try:
        path = _new_file(report)
    except OSError:
        return f"{what}; the traceback follows\n{report}"
    return f"{what}; the traceback is in {shown(path)}"


def _new_file(text: str) -> Path:
    """Write the text into a file of its own, readable as the user's umask says."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"mjp-fault-{stamp}-{os.getpid()}-{secrets.token_hex(3)}.txt"
    path = Path(tempfile.gettempdir()) / name
    with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return path


def _report(error: BaseException, words: Sequence[str]) -> str:
    """Command, versions and traceback."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return f"command: {shlex.join(words)}\nversions: {versions}, {python}\n\n{trace}"


def _version(package: str) -> str:
    module = sys.modules.get(package.replace("-", "_"))
    known = getattr(module, "__version__", None)
    try:
        return str(known or metadata.version(package))
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception:  # an error whose own text fails
        return ""
