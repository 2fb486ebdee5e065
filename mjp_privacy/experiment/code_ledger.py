"""code.json of a run folder: which files the code was made of that made its rows.

    {"9f31c0…": {"attacks/masked_span.py": "0f…", "attacks/equations/span.py": "c1…", …}, …}

The keys are what rows hold in their column `code`. Only messages depend on this file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import BadFile
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.sealed import read_sealed_json, write_sealed_json
from mjp_privacy.experiment.source_code import SourceCode

CODES = FileKind("the files that the code of a run is made of", "Run the attack again.", 1 << 28)


def code_file(root: Path) -> Path:
    """The file of this run folder."""
    return root / "code.json"


def note_code(root: Path, codes: Collection[SourceCode]) -> None:
    """Add these codes to the file; none is ever removed from it."""
    known = read_codes(root)
    new = {code.digest: dict(code.files) for code in codes if code.digest not in known}
    if new:
        write_sealed_json(code_file(root), {**known, **new})


def read_codes(root: Path) -> Mapping[str, Mapping[str, str]]:
    """What the file holds; empty if there is none that can be read."""
    path = code_file(root)
    if not is_there(path):
        return {}
    try:
        codes = read_sealed_json(path, CODES, needed=False)
    except BadFile:
        return {}
    return codes if _is_ledger(codes) else {}


def code_fault(root: Path, *, needed: bool) -> str:
    """What is wrong with the file; empty if nothing is, or if there is none.

    needed: whether a file without a seal is damaged; earlier versions wrote none
    """
    path = code_file(root)
    if not is_there(path):
        return ""
    try:
        codes = read_sealed_json(path, CODES, needed=needed)
    except BadFile as error:
        return error.got
    return "" if _is_ledger(codes) else "no digests of files by their names"


def seal_codes(root: Path) -> None:
    """Write the file of an earlier version again, with a seal."""
    if known := read_codes(root):
        write_sealed_json(code_file(root), known)


def _is_ledger(codes: Any) -> bool:
    """Whether this is {digest: {file: digest}}."""
    return isinstance(codes, dict) and all(
        isinstance(files, dict) and all(isinstance(text, str) for text in files.values())
        for files in codes.values()
    )
