"""Files written beside their place and renamed into it, so that a kill leaves whole ones only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from mjp_privacy.core.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary neighbour of `path`, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def output_folder(path: Path) -> Path:
    """The folder given as --out, made where it can be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {path}: expected a folder, or a place where one can be made; got: "
            f"{error.strerror}. Give another --out."
        ) from error
    return path
