"""Files that are complete or absent: written under a temporary name, then renamed into place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path beside `path`, then rename that file to `path`.

    write_atomically(path, lambda temporary: temporary.write_text("whole or not at all"))
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically; NaN and infinity are errors, since JSON has no such numbers."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file with a JSON object in each; empty if there is no file.

    A line that a killed process left unfinished is skipped.
    """
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def output_folder(path: Path) -> Path:
    """The folder given as --out, created if it does not exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {path}: expected a folder, or a place where one can be made; got: "
            f"{error.strerror}. Give another --out."
        ) from error
    return path
