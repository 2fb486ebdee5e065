"""Ctrl-C, SIGTERM and SIGHUP: one line, 130, 143 or 129, wherever a command is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
BOTH = pytest.mark.parametrize("number", CODES)

ENTRY = """
import sys, types
from mjp_privacy import __main__ as entry
from mjp_privacy import cli
from mjp_privacy.core import stop
stop.GRACE = 1.0

def command(argv, usage):
{body}

sys.modules["made"] = types.SimpleNamespace(command=command)
cli.COMMANDS = {{"made": cli.CommandEntry("made:command", example="made")}}
sys.argv = ["mjp", "made"]
raise SystemExit(entry.main())
"""


class Made:
    """A process whose command has this body; it prints "ready" where it waits."""

    def __init__(self, body: str, ignored: tuple[signal.Signals, ...] = ()) -> None:
        def hear_interrupts() -> None:  # nohup and a shell's background ignore them
            for number in CODES:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENTRY.format(body=lines)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_interrupts,
        )

    def __enter__(self) -> Made:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def signalled(self, *numbers: signal.Signals, pause: float = 0.1) -> tuple[int, str, str]:
        """Send signals; the exit code and what stood on stdout and stderr."""
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(pause)
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors


def is_the_stop(number: signal.Signals, code: int, errors: str) -> bool:
    """Whether a command ended with the signal's code and one line that names it."""
    return code == CODES[number] and errors.count("\n") == 1 and NAMES[number] in errors


WAIT = """
import time
print("ready", flush=True)
time.sleep(60)
return 0
"""


@BOTH
def test_a_stop_is_one_line_and_its_code(number: signal.Signals) -> None:
    with Made(WAIT) as made:
        code, _, errors = made.signalled(number)
    assert is_the_stop(number, code, errors)


SWALLOWED = """
import time, warnings
class Odd:
    def __del__(self):
        print("ready", flush=True)
        time.sleep(0.6)
del_me = Odd()
del del_me  # whatever is raised in __del__ is printed and forgotten
time.sleep(60)
return 0
"""
TURNED = """
import time, warnings
print("ready", flush=True)
try:
    time.sleep(60)
except BaseException as error:
    warnings.warn("numpy is not there")
    raise ImportError("numpy could not be imported") from None
"""
IN_A_THREAD = """
import threading, time
def fail():
    time.sleep(0.4)
    raise ValueError("pool was shut down")
threading.Thread(target=fail).start()
print("ready", flush=True)
try:
    time.sleep(60)
finally:
    time.sleep(0.5)
"""
COMPILED = """
import hashlib
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in compiled code, deaf to signals
"""


@pytest.mark.nightly
@pytest.mark.parametrize("body", [SWALLOWED, TURNED, IN_A_THREAD, COMPILED])
def test_whatever_a_library_makes_of_the_stop_it_is_the_stop(body: str) -> None:
    with Made(body) as made:
        code, _, errors = made.signalled(signal.SIGTERM)
    assert is_the_stop(signal.SIGTERM, code, errors)


CLEANS_UP = """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    time.sleep(0.7)
    print("tidied", flush=True)
"""


def test_cleaning_up_is_not_interrupted_by_the_same_stop() -> None:
    with Made(CLEANS_UP) as made:
        code, output, errors = made.signalled(signal.SIGINT)
    assert is_the_stop(signal.SIGINT, code, errors)
    assert output == "tidied\n"


@pytest.mark.parametrize(
    ("numbers", "code"),
    [((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGINT, signal.SIGTERM), 143)],
)
def test_a_second_signal_ends_at_once_even_compiled_code(
    numbers: tuple[signal.Signals, ...], code: int
) -> None:
    with Made(COMPILED) as made:
        time.sleep(0.5)  # it is in the compiled code by then
        began = time.monotonic()
        assert made.signalled(*numbers)[0] == code
    assert time.monotonic() - began < 0.9  # less than GRACE


LATE = """
import atexit, time
atexit.register(lambda: (print("ready", flush=True), time.sleep(1)))
return 3
"""


def test_a_signal_after_the_work_changes_nothing() -> None:
    with Made(LATE) as made:
        assert made.signalled(signal.SIGTERM) == (3, "", "")


FORKS = """
import os, signal, time
child = os.fork()
if not child:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    time.sleep(60)
    os._exit(0)
print("ready", flush=True)
time.sleep(0.3)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM, status
return 5
"""


def test_a_forked_child_dies_of_its_own_signals_and_the_command_goes_on() -> None:
    with Made(FORKS) as made:
        assert made.signalled() == (5, "", "")


def test_a_shells_background_goes_on_ignoring_ctrl_c() -> None:
    with Made(WAIT.replace("sleep(60)", "sleep(1)"), ignored=(signal.SIGINT,)) as made:
        assert made.signalled(signal.SIGINT) == (0, "", "")


SLOW_MODULE = """
import time
print("ready", flush=True)
try:
    time.sleep(60)
except BaseException:
    raise ImportError("a compiled module turns it into this") from None
"""


def test_a_signal_during_an_import_ends_the_command_there(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    body = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport slow_module\nreturn 0"
    with Made(body) as made:
        code, _, errors = made.signalled(signal.SIGTERM)
    assert is_the_stop(signal.SIGTERM, code, errors)
