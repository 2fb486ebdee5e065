"""A lock that lets only one process at a time work in a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import abandoned

try:
    import fcntl
except ImportError:  # Windows has no fcntl: no lock is taken there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the folder's lock: `with locked(Path("results/demo")): ...`

    The system releases the lock when the process ends, however it ends. Temporary files that
    killed processes left are deleted; those that a worker of an engine is writing stay.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    f"Another process is working in {root}: expected one at a time. Wait for it, "
                    "or give another --out."
                ) from error
        for leftover in abandoned(root):
            leftover.unlink(missing_ok=True)
        yield
