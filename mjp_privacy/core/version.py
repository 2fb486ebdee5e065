"""Which commit of this project is running."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The checkout's commit, followed by '+' if files were changed; '' outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return described.stdout.strip() if described.returncode == 0 else ""
