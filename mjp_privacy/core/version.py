"""Which commit of this project is running."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[1]
CODE = (PACKAGES, PACKAGES.with_name("attacks"))
"""What makes a figure; a changed text or a new result beside it does not make it another one."""


def commit() -> str:
    """The checkout's commit, followed by '+' if its code was changed; '' outside a checkout.

    A package that is installed inside somebody else's repository is outside.
    """
    code = [str(folder) for folder in CODE if folder.is_dir()]
    if not _git("ls-files", "--", __file__):
        return ""
    name = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", *code)
    if not name or changed is None:
        return ""
    return f"{name}+" if changed else name


def short(names: str) -> str:
    """The same words with each commit cut to seven digits; a '+' for changed code stays."""
    return re.sub(r"\b([0-9a-f]{7})[0-9a-f]+\b", r"\1", names)


def _git(*arguments: str) -> str | None:
    """What git prints in the package's folder; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=PACKAGES,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
