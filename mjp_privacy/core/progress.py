"""Progress on stderr: a bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from mjp_privacy.core.files import append_json_line

PLAIN_INTERVAL = 10.0  # seconds between two plain lines
PATIENCE = 1.0  # seconds that something may take without a bar


@dataclass
class Progress:
    """Counts units of work, and shows speed and time left once the work takes long.

        with Progress("decoding", lambda: len(paths), "images") as progress:
            for path in paths:
                progress.advance()

    total  how many units there are, counted when they are first shown; None where nobody knows
    log    a file that gets one line of JSON per message
    plain  whether lines are printed where there is no terminal
    """

    what: str
    total: int | Callable[[], int] | None
    unit: str = "files"
    log: Path | None = None
    plain: bool = True

    def __post_init__(self) -> None:
        self.done = self.fresh = self.shown = 0
        self.started = time.monotonic()
        self.console = Console(stderr=True)
        elsewhere = PLAIN_INTERVAL if self.plain else math.inf
        self.next = self.started + (PATIENCE if self.console.is_terminal else elsewhere)
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()
        elif self.fresh > self.shown and self.log and not self.console.is_terminal:
            self._show()

    def skip(self, units: int) -> None:
        """Count units that an earlier command finished: they do not enter the speed."""
        self.done += units

    def advance(self, units: int = 1, what: str = "") -> None:
        """Count units that were finished just now; `what` they belong to is shown."""
        self.done += units
        self.fresh += units
        self.what = what or self.what
        if self.bar or time.monotonic() > self.next:
            self._show()

    def _show(self) -> None:
        self.shown = self.fresh
        if callable(self.total):
            self.total = self.total()
        if not self.console.is_terminal:
            self.next = time.monotonic() + PLAIN_INTERVAL
            print(f"{self.what}: {self.figures()}", file=sys.stderr, flush=True)
            return
        if self.bar is None:
            columns = TextColumn("{task.description}", markup=False), BarColumn()
            text = TextColumn("{task.fields[figures]}")
            self.bar = Bar(*columns, text, console=self.console, transient=self.log is None)
            self.task = self.bar.add_task(self.what, total=self.total, figures="")
            self.bar.start()
        figures = self.figures()
        self.bar.update(self.task, description=self.what, completed=self.done, figures=figures)

    def figures(self) -> str:
        """What is done, the speed and the time left: "3/5 · 1.0 images/s · 0 min 02 s left"."""
        rate = self.fresh / max(time.monotonic() - self.started, 1e-9)
        if not isinstance(self.total, int) or not rate:
            return str(self.done)
        total = max(self.done, self.total)
        minutes, seconds = divmod(round((total - self.done) / rate), 60)
        speed = f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"
        left = f"{minutes} min {seconds:02d} s left"
        return f"{self.done}/{total} · {speed} {self.unit}/s · {left}"

    def say(self, message: str, **facts: object) -> None:
        """Show a message; the log gets it too, together with these facts."""
        if self.log:
            append_json_line(self.log, {"time": time.time(), "message": message, **facts})
        if self.bar:
            self.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=sys.stderr, flush=True)


@contextmanager
def doing() -> Iterator[Callable[[str], None]]:
    """A function that is told what begins: it stands behind a spinner on a terminal, elsewhere in a
    line once there was none for ten seconds; in a notebook nothing is shown."""
    quiet = "ipykernel" in sys.modules  # whose stderr says that it is a terminal
    console = Console(stderr=True, force_jupyter=False, quiet=quiet)
    said, timer = time.monotonic(), Timer(0, print)

    def say(what: str) -> None:
        nonlocal said
        said = time.monotonic()
        print(what, file=sys.stderr, flush=True)

    def begin(what: str) -> None:
        nonlocal timer
        status.update(what)
        timer.cancel()
        timer = Timer(max(0.0, said + PLAIN_INTERVAL - time.monotonic()), say, [what])
        if not (quiet or console.is_terminal):
            timer.start()

    with console.status("") as status:
        try:
            yield begin
        finally:
            timer.cancel()
