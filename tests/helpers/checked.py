"""`mjp check` as its text: `check_uploads(folder)` is what it prints and whether all is usable."""

from __future__ import annotations

from pathlib import Path

from mjp_privacy.uploads import check


def check_uploads(folder: Path) -> tuple[str, bool]:
    """The printed report on a folder of uploads, and whether every one can be attacked."""
    checked = check.check_uploads(folder)
    return checked.text(), checked.usable
