"""One table of a test session: its base inputs take some seconds to make."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.inputs.table import Table


@cache
def shared_table() -> Table:
    """A table with its base inputs, until this process ends."""
    scratch = Path(tempfile.mkdtemp(prefix="bad-inputs-"))
    table = Table(scratch)

    def close() -> None:
        table.__exit__(None, None, None)
        shutil.rmtree(scratch, ignore_errors=True)

    atexit.register(close)
    table.__enter__()
    return table
