"""The exceptions that users see without a traceback, and how any other error is put into words."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mjp_privacy.core.text import first_line, shown

DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE}
    | {errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOLCK, errno.ENOTCONN, errno.ETIMEDOUT}
)
"""The system's numbers of errors that are a disk's wherever they occur."""
GONE = (errno.ENOENT, errno.ENOTDIR)
"""Numbers of a path that is not there: a disk's only if its folder was taken away."""
NUMBER = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
"""How safetensors and pyarrow write the system's number."""
WITHOUT_NUMBER = ("PytorchStreamWriter failed", "inline_container.cc", "encoder error -2")
"""How torch and Pillow say that a file could not be written to its end, of which a full disk is the
commonest reason."""


class UserError(Exception):
    """A mistake the user can fix. The message says what was expected, what came, what to do."""


class WrongFields(UserError):
    """Values that a checked dataclass refuses; `mistakes` says which, without the class's name,
    which says nothing to whoever typed a command."""

    def __init__(self, where: str, mistakes: str) -> None:
        super().__init__(f"{where} has {mistakes}")
        self.mistakes = mistakes


class BadFile(UserError):
    """A file that is not what it should be. `path` is that file, `got` what is wrong with it."""

    def __init__(self, path: Path, message: str, got: str) -> None:
        super().__init__(message)
        self.path, self.got = path, got


class Unreadable(BadFile):
    """A file that the system does not let us read now: it may be sound."""


class NoFile(BadFile):
    """There is no file of this name."""


class StorageError(OSError):
    """A disk that does not take what is written: full, read-only, not ours, or gone.

    `what` names the file and says what is wrong.
    """

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what}. Mend that or give another place.")
        self.what, self.errno = what, number

    @staticmethod
    def of(path: object, number: int) -> StorageError:
        """The error for a file that cannot be written, by the system's number of the reason."""
        return StorageError(
            f"{shown(path)} cannot be written ({os.strerror(number).lower()})", number
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn any error that says that `path` cannot be written into a StorageError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        storage = storage_error(error, path)
        if storage is None or storage is error:
            raise
        raise storage from error


def storage_error(
    error: BaseException, path: Path | None = None, folders: tuple[Path, ...] = ()
) -> StorageError | None:
    """The error as that of a disk; None if it is of another kind.

    path     what was written, where that is known; else the error's own
    folders  the command works in these: what is missing there was taken away
    """
    if isinstance(error, StorageError):
        return error
    name = getattr(error, "filename", None)
    path = path or (Path(name) if isinstance(name, str) and name else None)
    number = error.errno if isinstance(error, OSError) else None
    kinds = (OSError, ValueError, RuntimeError)
    if number is None and (isinstance(error, kinds) or type(error).__name__ == "SafetensorError"):
        if found := NUMBER.search(str(error)):  # a library holds it in its text alone
            number = int(found[1] or found[2])
        elif any(words in str(error) for words in WITHOUT_NUMBER):
            number = errno.ENOSPC
    taken_away = path is not None and (
        not path.parent.exists() or any(f in path.absolute().parents for f in folders)
    )
    if number is None or not (number in DISK_ERRORS or (number in GONE and taken_away)):
        return None
    return StorageError.of(path or (folders[0] if folders else "the output"), number)


def format_error(error: BaseException) -> str:
    """An error of somebody's code in one line, the same on every machine: its class, the first line
    of what it says, and the innermost place in the code that is no library's:
    "RuntimeError: sizes do not match (attacks/mine.py:12)"."""
    if isinstance(error, SyntaxError) and error.filename:
        places = [(error.filename, error.lineno)]
    else:
        frames = traceback.walk_tb(error.__traceback__)
        places = [(frame.f_code.co_filename, line) for frame, line in frames]
        places = [(file, line) for file, line in places if not _is_library(Path(file))]
    where = ""
    if places:
        file, line = places[-1]
        where = f" ({'/'.join(Path(file).parts[-2:])}:{line})"
    return f"{type(error).__name__}{first_line(error)}{where}"


def _is_library(file: Path) -> bool:
    """Whether a file belongs to Python or to an installed package other than this one."""
    for packages in ("site-packages", "dist-packages"):
        if packages in file.parts:
            return file.parts[file.parts.index(packages) + 1] not in ("attacks", "mjp_privacy")
    return file.name.startswith("<") or file.is_relative_to(Path(os.__file__).parent)


def format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
