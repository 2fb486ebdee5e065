"""adopted.json of a run folder: the files that versions without seals wrote, and their digests.

{"seal": "mjp-seal:9f31…", "files": {"rows/0b3a689adbb159cb/00003.parquet": "c1…", …}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mjp_privacy.core.errors import BadFile
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.sealed import read_sealed_json, write_sealed_json

ADOPTED = FileKind(
    "the digests of files that an earlier version wrote", "Run the attack again.", 1 << 30
)
DIGEST = re.compile("[0-9a-f]{64}")


def adopted_path(root: Path) -> Path:
    """The file of this run folder."""
    return root / "adopted.json"


def write_adopted(root: Path, digests: Mapping[str, str]) -> None:
    """Write the digests, by the files' places in the folder."""
    write_sealed_json(adopted_path(root), {"files": dict(digests)})


def read_adopted(root: Path) -> Mapping[str, str] | None:
    """The digests; None if the file is damaged."""
    path = adopted_path(root)
    if not is_there(path):
        return {}
    try:
        content = read_sealed_json(path, ADOPTED, needed=True)
    except BadFile:
        return None
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        return None
    return {str(place): text for place, text in files.items() if DIGEST.fullmatch(str(text))}
