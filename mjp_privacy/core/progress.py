"""Progress of a run: a bar on a terminal, plain lines elsewhere, a JSON line per message."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mjp_privacy.core.checked_lines import JSON_LINES

PLAIN_INTERVAL = 10.0  # seconds between two plain lines
PATIENCE = 1.0  # seconds that something may take without a bar


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
        return _pace(self.fresh, self.total - self.done, self.started, "images")

    def say(self, message: str, **facts: object) -> None:
        """Show a message; the log gets it too, together with these facts."""
        if self.log:
            line = json.dumps({"time": time.time(), "message": message, **facts})
            JSON_LINES.append(self.log, [line])
        if self.bar:
            self.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=sys.stderr, flush=True)


class LateBar:
    """Any work but a run's units, such as reading files or measuring a model: shown once it takes
    longer than a second on a terminal, and elsewhere in a plain line every ten seconds.

        with LateBar("decoding", lambda: len(paths), "images") as bar:
            for path in paths:
                bar.advance()

    total: how many units there are, counted when they are first shown; None where nobody knows
    units: what is counted, for the speed
    """

    def __init__(self, what: str, total: Callable[[], int] | None, units: str = "files") -> None:
        self.what, self.count, self.units, self.done = what, total, units, 0
        self.console = Console(stderr=True)
        self.started = time.monotonic()
        self.next = self.started + (PATIENCE if self.console.is_terminal else PLAIN_INTERVAL)
        self.total: int | None = None
        self.bar: Progress | None = None

    def __enter__(self) -> LateBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def advance(self, units: int = 1) -> None:
        """So many units more are done."""
        self.done += units
        if self.bar:
            self.bar.update(self.task, completed=self.done, say=self._counted())
        elif time.monotonic() > self.next:
            self._show()

    def _show(self) -> None:
        if self.total is None and self.count:
            self.total = self.count()
        if not self.console.is_terminal:
            print(f"{self.what}: {self._counted()}", file=sys.stderr, flush=True)
            self.next = time.monotonic() + PLAIN_INTERVAL
            return
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[say]}")
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.task = self.bar.add_task(
            self.what, total=self.total, completed=self.done, say=self._counted()
        )
        self.bar.start()

    def _counted(self) -> str:
        if self.count is None:
            return str(self.done)
        total = max(self.done, self.total or 0)
        pace = _pace(self.done, total - self.done, self.started, self.units)
        return f"{self.done}/{total} · {pace}"


def _pace(done: int, left: int, started: float, units: str) -> str:
    """Speed and time left, such as "1.0 images/s · 0 min 02 s left"; nothing before the first."""
    rate = done / max(time.monotonic() - started, 1e-9)
    if not rate:
        return ""
    minutes, seconds = divmod(round(left / rate), 60)
    speed = f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"
    return f"{speed} {units}/s · {minutes} min {seconds:02d} s left"
