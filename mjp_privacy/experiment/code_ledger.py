"""code.json of a run folder: which files the code was made of that made its rows.

    {"9f31c0…": {"attacks/masked_span.py": "0f…", "attacks/equations/span.py": "c1…", …}, …}

The keys are what rows hold in their column `code`. Only messages depend on this file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from mjp_privacy.core.files import write_json
from mjp_privacy.experiment.source_code import SourceCode


def code_file(root: Path) -> Path:
    """The file of this run folder."""
    return root / "code.json"


def note_code(root: Path, codes: Collection[SourceCode]) -> None:
    """Add these codes to the file; none is ever removed from it."""
    known = read_codes(root)
    new = {code.digest: dict(code.files) for code in codes if code.digest not in known}
    if new:
        write_json(code_file(root), {**known, **new})


def read_codes(root: Path) -> Mapping[str, Mapping[str, str]]:
    """What the file holds; empty if there is none that can be read."""
    try:
        codes = json.loads(code_file(root).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return codes if isinstance(codes, dict) else {}
