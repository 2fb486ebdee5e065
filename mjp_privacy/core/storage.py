"""Whether an error says that a disk does not take what is written, whatever library wraps it.

with writing(path):        # any such error becomes a StorageError that names `path`
    library.save(path)
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mjp_privacy.core.errors import ADVICE, StorageError, UserError
from mjp_privacy.core.shown import shown

ALWAYS = {*ADVICE, errno.EIO, errno.ESTALE, errno.ENOLCK, errno.ENOTCONN, errno.ETIMEDOUT} - {
    errno.ENOENT,
    errno.ENOTDIR,
}
"""Numbers of errors that are a disk's, wherever they occur."""
GONE = (errno.ENOENT, errno.ENOTDIR)
"""Those of a path that is not there: a disk's only if the folder has gone."""
NUMBER = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
"""How safetensors and pyarrow hold the system's number in their texts."""
WITHOUT_NUMBER = ("PytorchStreamWriter failed", "inline_container.cc", "encoder error -2")
"""How torch and Pillow say that a file could not be written to its end."""
NEARLY_FULL = 1 << 20  # bytes


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn whatever says that `path` cannot be written into a StorageError; other errors pass."""
    try:
        yield
    except (StorageError, UserError):
        raise
    except Exception as error:
        if (number := storage_number(error, path)) is None:
            raise
        raise StorageError.of(shown(path), number) from error


def storage_number(error: BaseException, path: Path | None = None) -> int | None:
    """The system's number of a disk's error, or None where an error is of another kind.

    path    what was written, where that is known; else the error's own
    """
    number = _number(error)
    if number in GONE:
        return number if _folder_is_gone(error, path) else None
    return number if number in ALWAYS else _unnumbered(error, path)


def at_the_door(error: BaseException, places: tuple[Path, ...] = ()) -> StorageError | None:
    """The error that ends a command, if it is a disk's.

    places    folders that the command works in (`held`): what is missing there was taken away
    """
    if isinstance(error, StorageError):
        return error
    path, own = _path_of(error), _number(error)
    number = storage_number(error, path)
    if own in GONE and path is not None:
        absolute = path.absolute()
        number = own if any(place in absolute.parents for place in places) else number
    if number is None:
        return None
    named = shown(path or (places[0] if places else "the output"))
    return StorageError.of(named, number)


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    of_library = isinstance(error, (OSError, ValueError, RuntimeError))
    if not of_library and type(error).__name__ != "SafetensorError":
        return None
    matched = NUMBER.search(str(error))
    return int(matched[1] or matched[2]) if matched else None


def _unnumbered(error: BaseException, path: Path | None) -> int | None:
    if not isinstance(error, (OSError, RuntimeError)):
        return None
    if not any(words in str(error) for words in WITHOUT_NUMBER):
        return None
    return errno.ENOSPC if path is not None and _is_full(path.parent) else errno.EIO


def _is_full(folder: Path) -> bool:
    import shutil

    try:
        return shutil.disk_usage(folder).free < NEARLY_FULL
    except OSError:
        return False


def _folder_is_gone(error: BaseException, path: Path | None) -> bool:
    place = path or _path_of(error)
    return place is not None and not place.parent.exists()


def _path_of(error: BaseException) -> Path | None:
    name = getattr(error, "filename", None)
    return Path(name) if isinstance(name, str) and name else None
