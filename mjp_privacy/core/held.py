"""Folders that a command works in, and whether they are still the same ones.

A folder that is deleted or replaced while a command works in it would otherwise be made again by
the next file that is written, and the command would end as if all were well.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mjp_privacy.core.errors import StorageError
from mjp_privacy.core.shown import shown
from mjp_privacy.core.storage import at_the_door

_held: dict[Path, tuple[Path, int]] = {}
"""By absolute path: the file that marks the folder, and that file's open descriptor. As long as it
is open, the system gives its number to no other file."""


@contextmanager
def held_folder(root: Path) -> Iterator[None]:
    """Know a folder without a marker in it, such as a report's."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        with held(root, root, descriptor):
            yield
    finally:
        os.close(descriptor)


@contextmanager
def held(root: Path, marker: Path, descriptor: int) -> Iterator[None]:
    """Know the folder for a `with` block; without an error, it must be the same at its end.

    Any error in the block that is a disk's, of whatever library, becomes a StorageError.
    """
    place = root.absolute()
    before = _held.get(place)
    _held[place] = marker.absolute(), descriptor
    try:
        yield
        check_folder(place)
    except Exception as error:
        if not isinstance(error, StorageError):
            _blame_the_folder(place, error)
        told = at_the_door(error, places())
        if told is None or told is error:
            raise
        raise told from error
    finally:
        del _held[place]
        if before is not None:
            _held[place] = before


def _blame_the_folder(place: Path, error: Exception) -> None:
    """Raise a StorageError if the folder has gone: whatever failed then failed for that."""
    try:
        check_folder(place)
    except StorageError as gone:
        raise gone from error


def watch(root: Path, marker: Path) -> None:
    """Know the folder until the process ends: for a worker, which holds no lock."""
    place = root.absolute()
    if place not in _held:
        _held[place] = marker.absolute(), os.open(marker, os.O_RDONLY)


def places() -> tuple[Path, ...]:
    """The folders that this process works in, the latest first."""
    return tuple(reversed(_held))


def check_folder(path: Path) -> None:
    """Raise a StorageError if `path` lies in a folder that is no longer the one it was."""
    if not _held:
        return
    absolute = path.absolute()
    for root, (marker, descriptor) in _held.items():
        if root == absolute or root in absolute.parents:
            _check(root, marker, descriptor)


def _check(root: Path, marker: Path, descriptor: int) -> None:
    now = None
    try:
        now = marker.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
    was = os.fstat(descriptor)
    if now is None or (now.st_dev, now.st_ino) != (was.st_dev, was.st_ino):
        raise StorageError(
            f"{shown(root)} was deleted or replaced while the command worked in it, and with it "
            "what was done there",
            errno.ENOENT,
        )
