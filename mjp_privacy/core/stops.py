"""Ctrl-C, SIGTERM and SIGHUP as one exception: it ends a command in one line and keeps its state.

`listen` is called by `mjp_privacy.__main__` before anything large is imported. Who imports the
package without running a command gets none of this, nor do processes that a command forks. From
the first signal on, whatever is raised counts as the stop: libraries turn an interrupted import
into errors of their own. A second signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

LOOK = 0.1  # seconds between two looks at whether a stop is still on its way up
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
if hasattr(signal, "SIGHUP"):  # the terminal or the connection was closed; Windows has none
    NAMES[signal.SIGHUP] = "SIGHUP"


class Stopped(KeyboardInterrupt):
    """A signal asked this command to end."""


@dataclass
class _State:
    """What this process knows of signals."""

    number: int = 0  # of the first signal; 0: none came
    over: bool = False  # the command has ended; a signal comes too late
    again: str = ""  # what the same command would do now, as the line's end
    exception: weakref.ref[Stopped] | None = None
    """The exception as long as it is on its way up; a library may swallow it."""
    holding: int = 0  # how many things are under way that have to be ended in order


_state = _State()


def listen() -> None:
    """Have this process answer these signals, but for those that it was started to ignore, as by
    nohup."""
    for number in NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell's background has it
            signal.signal(number, _on_signal)
    _watch_for_a_second()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)


def then(again: str) -> None:
    """Say what the same command would do after a stop: "the same command goes on from here"."""
    _state.again = again


def stopped() -> bool:
    """Whether a signal asked the command to end."""
    return bool(_state.number)


def told() -> int:
    """Say in one line that the command was stopped; its exit code."""
    over()
    number = _state.number or signal.SIGINT
    end_of_line = f"; {_state.again}" if _state.again else ""
    with suppress(OSError, ValueError, RuntimeError):
        sys.stderr.write(f"stopped by {NAMES[signal.Signals(number)]}{end_of_line}\n")
        sys.stderr.flush()
    return 128 + number


def over() -> None:
    """The command has its exit code: a signal changes nothing any more, unless one has stopped it;
    then a second one still ends the process at once."""
    _state.over = True
    if _state.number:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        return
    for number in NAMES:
        if signal.getsignal(number) is _on_signal:  # Python's own end would reset it
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def holding() -> Iterator[None]:
    """Something is under way that must be ended in order, such as a folder that is locked: a signal
    during an import waits for the import's end, and does not end the process at once."""
    _state.holding += 1
    try:
        yield
    finally:
        _state.holding -= 1


@contextmanager
def kept() -> Iterator[None]:
    """Take the signals back from a library that has installed handlers of its own."""
    before = {number: signal.getsignal(number) for number in NAMES}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _state.over or _state.number:  # the watching thread ends the process at a second one
        return
    _state.number = number
    _be_quiet()
    if _in_an_import(frame) and not _state.holding:
        _end_here()
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _look_again)
        signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
        if _in_an_import(frame):
            return
    raise _new_exception()


def _look_again(_: int, frame: FrameType | None) -> None:
    """Raise the stop where it waited for an import, or where somebody swallowed it."""
    on_its_way = _state.exception is not None and _state.exception() is not None
    if not (_state.over or on_its_way or _in_an_import(frame)):
        raise _new_exception()


def _new_exception() -> Stopped:
    """A function of its own, so that no frame of the traceback refers to the exception."""
    exception = Stopped()
    _state.exception = weakref.ref(exception)
    return exception


def _in_an_import(frame: FrameType | None) -> bool:
    """Whether a module is being imported. An exception there may be swallowed, or abort the
    process: compiled modules answer one in many ways."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end_here() -> None:
    """End the process from within a signal's handler: nothing is held that could be left."""
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: it was just being written
        sys.stdout.flush()
    os._exit(told())


def _be_quiet() -> None:
    """From now on errors are consequences of the stop: nothing shows them."""
    sys.excepthook = lambda *_: None
    sys.unraisablehook = lambda *_: None
    threading.excepthook = lambda *_: None
    warnings.simplefilter("ignore")


# the second signal --------------------------------------------------------------------------------


def _watch_for_a_second() -> None:
    """A thread hears of each signal at once; Python's own handlers wait until whatever compiled
    code the main thread is in has ended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="mjp-stops", daemon=True).start()


def _watch(reader: int) -> None:
    signals = 0
    while True:
        for number in os.read(reader, 64):
            signals += number in NAMES
            if number in NAMES and signals == 2:
                os.write(2, b"stopped at once by a second signal\n")
                os._exit(128 + number)


def _forget() -> None:
    """In a process that was forked: as if nobody had listened."""
    signal.set_wakeup_fd(-1)
    _state.over = True
    for number in NAMES:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, _default(number))


def _default(number: int) -> signal.Handlers:
    interrupt: signal.Handlers = signal.default_int_handler  # type: ignore[assignment]
    return interrupt if number == signal.SIGINT else signal.SIG_DFL
