"""Files that are complete or absent: written under a temporary name, then renamed into place.

A temporary file is called .NAME.PID@HOST.tmp after the process that writes it, so that several
processes, also on several machines, can write into one folder.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.core.gate.file_kind import FileKind
from mjp_privacy.core.held import check_folder
from mjp_privacy.core.shown import shown
from mjp_privacy.core.stops import holding
from mjp_privacy.core.storage import ALWAYS, writing

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # C:/ has one letter only

DAY = 24 * 3600.0  # seconds; nothing takes so long to write
ADDED_TO = FileKind(
    "a file that lines are added to", "Take it away, or give another --out.", 1 << 50
)
OWN_NAME = re.compile(r"\..+\.[0-9]+(@[A-Za-z0-9-]+)?\.tmp", re.DOTALL)
"""What a temporary file is called; earlier versions left the machine out."""
PROBE = 1 << 16  # bytes; a full disk often has room for a few hundred


def write_atomically(path: Path, write: Callable[[Path], object], *, lasting: bool = False) -> None:
    """Call `write` with a temporary path beside `path`, then rename that file to `path`.

    write_atomically(path, lambda temporary: temporary.write_text("whole or not at all"))

    lasting: the file is on the disk itself when this returns, and survives a loss of power
    """
    write_named(path, write, lambda temporary: path.name, lasting=lasting)


def write_named(
    path: Path,
    write: Callable[[Path], object],
    name_of: Callable[[Path], str],
    *,
    lasting: bool = False,
) -> Path:
    """The same for a file whose name depends on its content: `name_of` gets the written file, and
    says what it is called in the folder of `path`.

    Who may read the file is what the process' umask says, whatever library writes it. A disk that
    does not take it is a StorageError, and so is a folder that was taken away.
    """
    check_folder(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}@{_host()}.tmp")
    with writing(path), holding():
        new_folder = not path.parent.is_dir()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)
            write(temporary)
            if stat.S_IMODE(temporary.stat().st_mode) != mode:
                temporary.chmod(mode)
            if lasting:
                bring_to_disk(temporary)
            target = path.with_name(name_of(temporary))
            temporary.replace(target)
            if lasting:
                bring_to_disk(path.parent)
            if lasting and new_folder:
                bring_to_disk(path.parent.parent)
            return target
        finally:
            with suppress(OSError):  # as on a disk that has become read-only
                temporary.unlink(missing_ok=True)


def bring_to_disk(path: Path) -> None:
    """Wait until the disk holds this file, or this folder's names, where the system can say so."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what keeps the file is no disk
            raise
    finally:
        os.close(handle)


def abandoned(root: Path) -> Iterator[Path]:
    """Temporary files under this folder that nobody writes any more.

    These are files of processes of this machine that are gone, files older than a day, and files
    whose name holds no machine, as earlier versions named them. Other hidden files whose name ends
    in .tmp are somebody else's.
    """
    for path in root.rglob(".*.tmp"):
        if OWN_NAME.fullmatch(path.name) and path.is_file() and _is_abandoned(path):
            yield path


def sweep(root: Path) -> None:
    """Delete the temporary files that killed processes left under this folder."""
    for leftover in abandoned(root):
        leftover.unlink(missing_ok=True)


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


def check_disk(folder: Path) -> None:
    """Raise a StorageError unless a small file can be written there to its end."""
    write_atomically(folder / "probe", lambda temporary: temporary.write_bytes(bytes(PROBE)))
    (folder / "probe").unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically; NaN and infinity are errors, since JSON has no such numbers."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def appending(path: Path) -> BinaryIO:
    """The file opened to read it and to add to its end; one that is no file is refused unopened,
    for a named pipe without a reader would keep the command waiting."""
    if path.exists():
        ADDED_TO.check(path)
    try:
        return path.open("ab+")
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ESPIPE):  # it has no end, as /proc/self/mem
            raise ADDED_TO.refusal(path, "what nothing can be added to") from error
        raise


def output_file(path: Path) -> Path:
    """The file given as --out, before work begins: its folder is made, and a small file is written
    there and removed again."""
    if path.is_dir():
        raise UserError(f"--out {path}: expected a file, got a folder. Give a name in it.")
    output_folder(path.parent)
    try:
        check_disk(path.parent)
    except FileNotFoundError as error:  # the folder is there; it is the system's own, as /proc is
        raise UserError(
            f"--out {shown(path)}: expected a folder in which files can be made, got "
            f"{shown(path.parent)}. Give another --out."
        ) from error
    return path


def output_folder(path: Path) -> Path:
    """The folder given as --out, created if it does not exist."""
    check_name(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in ALWAYS:
            raise StorageError.of(f"--out {path}", error.errno) from error
        raise UserError(
            f"--out {path}: expected a folder, or a place where one can be made; got: "
            f"{error.strerror}. Give another --out."
        ) from error
    return path


def check_name(path: Path) -> None:
    """Raise unless the name given as --out is text and no address, as s3://bucket/run: the
    libraries that write tables and weights take no other, or would write elsewhere."""
    if ADDRESS.match(str(path)):
        raise UserError(
            f"--out {shown(path)}: expected a folder of this machine, got an address. Give a "
            "folder, and copy it from there."
        )
    if not _is_text(path):
        raise UserError(
            f"--out {shown(path)}: expected a name in UTF-8, got bytes of another encoding. Give "
            "another --out."
        )


def unmistakable(path: Path) -> Path:
    """The path as no library takes it for an address: run:1/rows would be one to pyarrow."""
    return path.absolute() if ":" in "".join(path.parts[:1]) else path


def _is_text(path: Path) -> bool:
    """Whether the part of a path that its user named can be written in UTF-8."""
    here = Path.cwd()
    named = path.relative_to(here) if path.is_relative_to(here) else path
    try:
        str(named).encode()
    except UnicodeEncodeError:
        return False
    return True
