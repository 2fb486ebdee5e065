"""Ctrl-C, SIGTERM and SIGHUP as one exception: it ends a command in one line and keeps its state.

`listen` is called by `mjp_privacy.__main__` before anything large is imported; who imports the
package without running a command gets none of this. From the first signal on, whatever is raised
counts as the interruption: libraries turn it into errors of their own. A second signal ends the
process at once, and so do GRACE seconds, if compiled code is deaf to the first or swallowed it:
files are written whole or not at all, so that a process may end anywhere.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

GRACE = 10.0  # seconds
PAUSE = 0.1  # seconds between two looks at a main thread that has not answered
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
if hasattr(signal, "SIGHUP"):  # the terminal or the connection was closed; Windows has none
    NAMES[signal.SIGHUP] = "SIGHUP"


@dataclass
class State:
    number: int = 0  # of the first signal; 0: none came
    over: bool = False  # the command has ended; a signal comes too late
    again: str = ""  # what the same command would do now, as the line's end


state = State()


def listen() -> None:
    """Answer these signals from now on, but for those that the process was started to ignore, as
    by nohup or in a shell's background."""
    for number in NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="mjp-stop", daemon=True).start()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_restore)


def interrupted() -> bool:
    return bool(state.number)


def report() -> int:
    """Say in one line that the command was stopped; its exit code."""
    finish()
    number = state.number or signal.SIGINT
    end_of_line = f"; {state.again}" if state.again else ""
    with suppress(OSError, ValueError, RuntimeError):
        sys.stderr.write(f"stopped by {NAMES[signal.Signals(number)]}{end_of_line}\n")
        sys.stderr.flush()
    return 128 + number


def finish() -> None:
    """The command has its exit code: a signal changes nothing any more; after a first one, a second
    one still ends the process at once."""
    state.over = True
    for number in NAMES:
        if not state.number and signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_IGN)  # Python's own end would reset it


def _on_signal(number: int, frame: FrameType | None) -> None:
    if state.over or state.number:
        return
    state.number = number
    sys.excepthook = lambda *_: None  # errors and warnings are consequences from now on
    sys.unraisablehook = lambda *_: None
    threading.excepthook = lambda *_: None
    warnings.simplefilter("ignore")
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            # a compiled module that is being loaded swallows an exception, or aborts
            with suppress(OSError, ValueError, RuntimeError):  # it was just being written
                sys.stdout.flush()
            os._exit(report())
        frame = frame.f_back
    raise KeyboardInterrupt


def _watch(reader: int) -> None:
    """In a thread, which hears of signals while compiled code keeps the main thread: Python's own
    handlers wait for its end, and now and then for the end of a system call."""
    numbers: list[int] = []
    ends = math.inf
    while len(numbers) < 2:
        if select.select([reader], [], [], PAUSE if numbers else None)[0]:
            numbers += [number for number in os.read(reader, 64) if number in NAMES]
            if numbers and ends == math.inf:
                ends = time.monotonic() + GRACE
        elif time.monotonic() > ends:
            if not state.over:
                state.number = numbers[0]
                report()
            os._exit(128 + numbers[0])
    os.write(2, b"stopped at once by a second signal\n")
    os._exit(128 + numbers[1])


def _restore() -> None:
    """In a process that was forked: as if nobody had listened."""
    signal.set_wakeup_fd(-1)
    state.over = True
    for number in NAMES:
        if signal.getsignal(number) is _on_signal:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
