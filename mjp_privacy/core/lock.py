"""One process at a time in a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mjp_privacy.core.errors import UserError

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """The lock ends with its process, however that ends; what a killed one left is swept."""
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
        for leftover in root.rglob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        yield
