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
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mjp_privacy.core.errors import DISK_ERRORS, StorageError, UserError, storage_error, writing
from mjp_privacy.core.read import CHECK, FileKind, without_waiting
from mjp_privacy.core.text import first_of, shown

try:
    import fcntl
except ImportError:  # Windows has no fcntl: no lock is taken there
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
HOST = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
TEMPORARY = re.compile(r"\..+\.([0-9]+)@([A-Za-z0-9-]+)\.tmp", re.DOTALL)
DAY = 24 * 3600.0  # seconds; nothing takes so long to write
PROBE = 1 << 16  # bytes; a full disk often has room for a few hundred
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # C:/ has one letter only
LOG = FileKind("a file that lines are added to", "Take it away, or give another --out.", 1 << 50)
LONGEST_LINE = 1 << 24  # bytes; all that are written are shorter

# writing -----------------------------------------------------------------------------------------


def write_atomically(
    path: Path,
    write: Callable[[Path], object],
    *,
    durable: bool = False,
    name_of: Callable[[Path], str] | None = None,
) -> Path:
    """Call `write` with a temporary path beside `path`, then rename that file to `path`.

    write_atomically(path, lambda temporary: temporary.write_text("whole or not at all"))

    durable  the file is on the disk itself when this returns, and survives a loss of power
    name_of  says of the written file what it is called in the folder of `path`, where its name
             depends on its content

    Who may read the file is what the process' umask says, whatever library writes it. A disk that
    does not take it is a StorageError, and so is a folder that was taken away.
    """
    check_folder(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}@{HOST}.tmp")
    with writing(path):
        folders = [path.parent] if path.parent.is_dir() else [path.parent, path.parent.parent]
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)
            write(temporary)
            if stat.S_IMODE(temporary.stat().st_mode) != mode:
                temporary.chmod(mode)
            if durable:
                fsync(temporary)
            target = path if name_of is None else path.with_name(name_of(temporary))
            temporary.replace(target)
            for folder in folders if durable else ():
                fsync(folder)
            return target
        finally:
            with suppress(OSError):  # as on a disk that has become read-only
                temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
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


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically; NaN and infinity are errors, since JSON has no such numbers."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def json_line(fields: Mapping[str, Any]) -> str:
    """A line of JSON with the checksum of what stands before it, so that one changed bit is
    noticed: `{"step": 1, "check": "1c291ca3"}`."""
    body = json.dumps(fields)[:-1]
    return f'{body}{CHECK.decode()}{zlib.crc32(body.encode()):08x}"}}\n'


def append_json_line(path: Path, fields: Mapping[str, Any]) -> None:
    """Add a line; what a killed process left of a last one is removed."""
    check_folder(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            LOG.check(path)  # opening a named pipe would wait for a reader
        with path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                file.seek(max(size - LONGEST_LINE, 0))
                tail = file.read()
                file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
            file.write(json_line(fields).encode())


def sweep(root: Path) -> None:
    """Delete the temporary files that killed processes left under this folder: those of processes
    of this machine that are gone, and those older than a day."""
    for path in root.rglob(".*.tmp"):
        named = TEMPORARY.fullmatch(path.name)
        if named is None or not path.is_file():
            continue
        gone = False
        try:
            if named[2] == HOST and os.name == "posix":  # elsewhere signal 0 is no question
                os.kill(int(named[1]), 0)
        except ProcessLookupError:
            gone = True
        except (OSError, OverflowError):  # OSError: somebody else's process
            pass
        with suppress(OSError):  # it was renamed or removed just now
            if gone or time.time() - path.stat().st_mtime > DAY:
                path.unlink(missing_ok=True)


# folders that a command works in -----------------------------------------------------------------

_folders: dict[Path, tuple[Path, int]] = {}
"""By absolute path: the file that marks the folder, and its number on the disk."""


@contextmanager
def lock(root: Path) -> Iterator[None]:
    """Let only one process at a time work in a run folder: `with lock(Path("results/demo")): ...`

    The system releases the lock when the process ends, however it ends. Temporary files that
    killed processes left are deleted; those that a worker of an engine is writing stay.
    """
    marker = root / LOCK
    with writing(marker):
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(marker, os.O_RDWR | os.O_CREAT, 0o666)  # a named pipe does not block
    with os.fdopen(descriptor, "w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"Another process is working in {root}: expected one at a time. Wait for it, "
                    "or give another --out."
                ) from error
        sweep(root)
        with working_in(root):
            yield


def is_locked(root: Path) -> bool:
    """Whether a process is working in this run folder now, as far as the system tells."""
    if fcntl is None:
        return False
    try:
        with open(root / LOCK, "rb", opener=without_waiting) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody has worked in it, or it is not ours
        return False
    return False


@contextmanager
def working_in(root: Path) -> Iterator[None]:
    """Have writing fail once the folder was deleted or replaced, for writing would make it anew and
    the command end as if all were well. Any error in the block that is a disk's, of whatever
    library, becomes a StorageError."""
    place, before = root.absolute(), dict(_folders)
    watch_folder(root)
    try:
        yield
        check_folder(place)
    except Exception as error:
        check_folder(place)  # whatever failed, failed for that
        storage = storage_error(error, folders=working_folders())
        if storage is None or storage is error:
            raise
        raise storage from error
    finally:
        _folders.clear()
        _folders.update(before)


def watch_folder(root: Path) -> None:
    """The same until the process ends, for a worker of an engine, which holds no lock."""
    marker = root.absolute() / LOCK
    marker = marker if marker.exists() else root.absolute()
    _folders[root.absolute()] = marker, marker.stat().st_ino


def working_folders() -> tuple[Path, ...]:
    """The folders that this process works in, the latest first."""
    return tuple(reversed(_folders))


def check_folder(path: Path) -> None:
    """Raise a StorageError if `path` lies in a folder that is no longer the one it was."""
    for root, (marker, number) in _folders.items():
        if path.absolute().is_relative_to(root) and not (
            marker.exists() and marker.stat().st_ino == number
        ):
            raise StorageError(
                f"{shown(root)} was deleted or replaced while the command worked in it, and with "
                "it what was done there",
                errno.ENOENT,
            )


# --out -------------------------------------------------------------------------------------------


def output_file(path: Path) -> Path:
    """The file given as --out, before work begins: its folder is made, and a small file is written
    there and removed again."""
    if path.is_dir():
        raise UserError(f"--out {path}: expected a file, got a folder. Give a name in it.")
    output_folder(path.parent)
    check_disk(path.parent)
    return path


def check_disk(folder: Path) -> None:
    """Raise a StorageError unless a small file can be written there to its end."""
    write_atomically(folder / "probe", lambda temporary: temporary.write_bytes(bytes(PROBE)))
    (folder / "probe").unlink(missing_ok=True)


def output_folder(path: Path) -> Path:
    """The folder given as --out, created if it does not exist."""
    check_name(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise StorageError.of(f"--out {path}", error.errno) from error
        raise UserError(
            f"--out {shown(path)}: expected a folder, or a place where one can be made; got: "
            f"{error.strerror}. Give another --out."
        ) from error
    return path


def check_own(
    out: Path, command: str = "", own: Collection[str] = (), do: str = "move them away"
) -> None:
    """Raise where the --out of a command that starts anew each time holds anything but files of
    these names, or patterns, as an earlier call left them: somebody's would be written over. Hidden
    files may be there where a command is named: of others it must be empty."""
    try:
        names = sorted(path.name for path in out.iterdir())
        names = [name for name in names if not (command and name.startswith("."))]
    except (OSError, ValueError):  # it is not there, or whoever makes it says why it cannot
        return
    others = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in own)]
    if others:
        earlier = f"an earlier --out of `{command}`, or " if command else ""
        raise UserError(
            f"--out {shown(out)}: expected {earlier}an empty or new folder; got one with other "
            f"files ({shown(first_of(others, 2))}). Give another --out, or {do}."
        )


def check_each_once(folders: Sequence[Path], what: str) -> None:
    """Raise unless these are one or more folders, and none of them is given twice."""
    if not folders or len({folder.resolve() for folder in folders}) < len(folders):
        given = ", ".join(map(shown, folders)) or "none"
        raise UserError(f"Expected one or more {what}, each of them once, got {given}.")


def check_name(path: Path) -> None:
    """Raise unless the name given as --out is text and no address, as s3://bucket/run: the
    libraries that write tables and weights take no other, or would write elsewhere."""
    named = os.path.relpath(path)  # where one stands is one's own affair
    if ADDRESS.match(str(path)):
        got = "an address. Give a folder of this machine, and copy it from there"
    elif named.encode(errors="replace").decode() != named:
        got = "bytes of another encoding. Give another --out"
    else:
        return
    raise UserError(f"--out {shown(path)}: expected a name in UTF-8, got {got}.")
