"""Progress of a run: a bar on a terminal, plain lines elsewhere, a JSON line per message."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mjp_privacy.core.files import appending

PLAIN_INTERVAL = 10.0  # seconds between two plain lines


class RunProgress:
    """Counts finished units (a unit is one image in one cell) and shows speed and time left.

    log: a file that gets one JSON line per message.
    """

    def __init__(self, total: int, log: Path | None = None) -> None:
        self.total, self.done, self.fresh, self.of_other_code = total, 0, 0, 0
        self.unrecorded = 0
        self.started = self.last_line = time.monotonic()
        self.log = log
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[say]}"),
            )
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("attack", total=total, say="")

    def __enter__(self) -> RunProgress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()
        elif self.fresh:
            self._line("attack")
        if not error and not self.fresh and self.done == self.total:
            other = f", {self.of_other_code} of them by other code" if self.of_other_code else ""
            before = f", {self.unrecorded} of them before code was recorded"
            earlier = f"{other}{before if self.unrecorded else ''}"
            self.say(f"all {self.total} units are finished already{earlier}; nothing to do")

    def skip(self, units: int, of_other_code: int = 0, unrecorded: int = 0) -> None:
        """Count units that an earlier command finished, and how many of these by other code than
        this command's, or by code that was not recorded; they do not enter the speed."""
        self.done += units
        self.of_other_code += of_other_code
        self.unrecorded += unrecorded

    def advance(self, units: int, what: str) -> None:
        """Count units that were finished just now; `what` they belong to is shown."""
        self.done += units
        self.fresh += units
        if self.bar:
            self.bar.update(self.task, completed=self.done, description=what, say=self.speed())
        elif time.monotonic() - self.last_line > PLAIN_INTERVAL:
            self._line(what)

    def _line(self, what: str) -> None:
        self.last_line = time.monotonic()
        print(f"{what}: {self.done}/{self.total} · {self.speed()}", file=sys.stderr, flush=True)

    def speed(self) -> str:
        """Images per second and the time left, such as "1.0 images/s · 0 min 02 s left"."""
        elapsed = time.monotonic() - self.started
        rate = self.fresh / max(elapsed, 1e-9)
        if not rate:
            return ""
        minutes, seconds = divmod(round((self.total - self.done) / rate), 60)
        return f"{rate:.1f} images/s · {minutes} min {seconds:02d} s left"

    def say(self, message: str, **facts: object) -> None:
        """Show a message; the log gets it too, together with these facts."""
        if self.log:
            with appending(self.log) as file:
                line = json.dumps({"time": time.time(), "message": message, **facts})
                file.write(line.encode() + b"\n")
        if self.bar:
            self.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=sys.stderr, flush=True)
