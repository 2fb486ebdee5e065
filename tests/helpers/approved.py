"""Texts that a person approved: `approved("console.txt", text)` compares one with its file.

`MJP_APPROVE=1 pytest …` writes the files anew; read what changed before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "report" / "approved"


def approved(name: str, text: str) -> None:
    """Fail where the text is not the approved one."""
    file = FOLDER / name
    if os.environ.get("MJP_APPROVE"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
