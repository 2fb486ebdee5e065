"""What a file is expected to be. Whatever else it is becomes one sentence that names it.

HEADER = FileKind("the JSON header of an upload", "Record it again, or take its files out.")
content = HEADER.bytes(path)        # a regular file of a bearable size, or a UserError
with HEADER.reading(path):          # any error of a library becomes a UserError
    library.load(path)
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.shown import shown

MIB = 1 << 20
OF_THE_MOMENT = frozenset(
    {errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
    | {errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.EINTR}
)
"""Numbers of errors that say nothing of the file itself."""


class BadFile(UserError):
    """A file that is not what it should be. `path` is that file, `got` what is wrong with it."""

    def __init__(self, path: Path, message: str, got: str) -> None:
        super().__init__(message)
        self.path, self.got = path, got


class Unreadable(BadFile):
    """A file that the system does not let us read now: it may be sound."""


class NoFile(BadFile):
    """There is no file of this name."""


@dataclass(frozen=True)
class FileKind:
    """What a reader expects, and what its user can do where a file is something else."""

    expected: str  # such as "the JSON header of an upload"
    do: str  # a sentence or more, such as "Record this upload again."
    max_bytes: int = 64 * MIB

    def advising(self, do: str) -> FileKind:
        """The same kind of file with other advice."""
        return replace(self, do=do)

    def refusal(self, path: Path, got: str, field: str = "") -> BadFile:
        """The error for a file, or for one field in it: `raise KIND.refusal(path, "3 rows")`."""
        place = f"{shown(path)}, {shown(field)}" if field else shown(path)
        return BadFile(path, f"{place}: expected {self.expected}; got {got}. {self.do}", got)

    def check(self, path: Path) -> int:
        """Raise unless this is a regular file of a bearable size; its size in bytes.

        Pipes and devices are refused unopened: reading one can take for ever.
        """
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            refusal = self.refusal(path, "no file of this name")
            raise NoFile(path, str(refusal), refusal.got) from error
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise self._because_of(path, error) from error
        return self._checked(path, status)

    def _checked(self, path: Path, status: os.stat_result) -> int:
        if not stat.S_ISREG(status.st_mode):
            raise self.refusal(path, _what_it_is(status.st_mode))
        if status.st_size > self.max_bytes:
            limit = f"{self.max_bytes / MIB:,.1f} MiB"
            raise self.refusal(path, f"{status.st_size / MIB:,.1f} MiB, more than {limit}")
        return status.st_size

    def bytes(self, path: Path) -> bytes:
        """The content of the file."""
        self.check(path)
        with self.reading(path), open(path, "rb", opener=without_waiting) as file:
            self._checked(path, os.fstat(file.fileno()))  # it may have been replaced since
            content = _up_to(file, self.max_bytes + 1)
        if len(content) > self.max_bytes:  # a file of /proc has no size of its own
            raise self.refusal(path, f"more than {self.max_bytes / MIB:,.1f} MiB")
        return content

    def text(self, path: Path) -> str:
        """The content of a file in UTF-8."""
        content = self.bytes(path)
        with self.reading(path):
            return content.decode("utf-8-sig")

    def sha256(self, path: Path) -> str:
        """The SHA-256 of the file's bytes, in hexadecimal, whatever its size in memory."""
        import hashlib

        digest = hashlib.sha256()
        self.check(path)
        with self.reading(path), path.open("rb") as file:
            while chunk := file.read(MIB):
                digest.update(chunk)
        return digest.hexdigest()

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Turn whatever a library raises on this file into a UserError: keep the body to the
        library's call, since the body's own mistakes are turned too."""
        try:
            yield
        except UserError:
            raise
        except FileNotFoundError as error:
            refusal = self.refusal(path, "no file of this name")
            raise NoFile(path, str(refusal), refusal.got) from error
        except Exception as error:
            raise self._because_of(path, error) from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of a library in Rust
                raise
            raise self.refusal(path, reason(error)) from error

    def _because_of(self, path: Path, error: Exception) -> BadFile:
        refusal = self.refusal(path, reason(error))
        if isinstance(error, OSError) and error.errno in OF_THE_MOMENT:
            return Unreadable(path, str(refusal), refusal.got)
        return refusal


def _up_to(file: BinaryIO, most: int) -> bytes:
    """At most so many bytes, in pieces: Python allocates at once what `read` is asked for."""
    pieces = []
    while most > 0 and (piece := file.read(min(most, MIB))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def without_waiting(path: str, flags: int) -> int:
    """Open a file as `open` does, and never wait for somebody to write into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def reason(error: BaseException, limit: int = 200) -> str:
    """What a library says in an error, as the end of a sentence: one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = shown(lines[0].rstrip("."), limit) if lines else ""
    name = type(error).__name__
    if isinstance(error, MemoryError):
        return "a file that needs more memory than there is"
    return f"what cannot be read ({name}: {said})" if said else f"what cannot be read ({name})"


def is_there(path: Path) -> bool:
    """Whether there is anything of this name: a wrong kind of file is then refused by its reader,
    not passed over."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a NUL in the path, or a name that is too long
        return False


def _what_it_is(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a named pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((words for is_it, words in kinds.items() if is_it(mode)), "no regular file")
