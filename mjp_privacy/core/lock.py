"""A lock that lets only one process at a time work in a run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import sweep
from mjp_privacy.core.held import held, watch
from mjp_privacy.core.shown import shown
from mjp_privacy.core.stops import holding
from mjp_privacy.core.storage import writing

try:
    import fcntl
except ImportError:  # Windows has no fcntl: no lock is taken there
    fcntl = None  # type: ignore[assignment]


LOCK = ".lock"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the folder's lock: `with locked(Path("results/demo")): ...`

    The system releases the lock when the process ends, however it ends. Temporary files that
    killed processes left are deleted; those that a worker of an engine is writing stay. A folder
    that is taken away meanwhile is a StorageError (`held`).
    """
    marker = root / LOCK
    if marker.is_dir():
        raise UserError(
            f"{shown(marker)}: expected the file that locks this folder, got a folder. Take it "
            "away, or give another --out."
        )
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
        with held(root, marker, file.fileno()), holding():
            yield


def watch_folder(root: Path) -> None:
    """Have every file that this process writes below `root` fail once the folder that another
    process has locked is gone: for workers of an engine."""
    marker = root / LOCK
    if marker.exists():
        watch(root, marker)
