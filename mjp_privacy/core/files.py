"""Files that are complete or absent: written under a temporary name, then renamed into place.

A temporary file is called .NAME.PID@HOST.tmp after the process that writes it, so that several
processes, also on several machines, can write into one folder.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import UserError

DAY = 24 * 3600.0  # seconds; nothing takes so long to write


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path beside `path`, then rename that file to `path`.

    write_atomically(path, lambda temporary: temporary.write_text("whole or not at all"))
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}@{_host()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def abandoned(root: Path) -> Iterator[Path]:
    """Temporary files under this folder that nobody writes any more.

    These are files of processes of this machine that are gone, files older than a day, and files
    whose name holds no machine, as earlier versions named them.
    """
    for path in root.rglob(".*.tmp"):
        if _is_abandoned(path):
            yield path


def _is_abandoned(path: Path) -> bool:
    writer = path.name.removesuffix(".tmp").rpartition(".")[2]
    pid, at, host = writer.partition("@")
    if not at:
        return True
    if host == _host() and not _is_running(pid):
        return True
    try:
        return time.time() - path.stat().st_mtime > DAY
    except OSError:  # it was renamed or removed just now
        return False


def _host() -> str:
    """This machine's name, as file names hold it."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


def _is_running(pid: str) -> bool:
    """Whether there is a process of this number, or whether that cannot be known."""
    if os.name != "posix":  # elsewhere signal 0 is no question
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):  # OSError: somebody else's process
        return True
    return True


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
