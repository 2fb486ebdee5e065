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

ENTRY = """
import sys, types
from mjp_privacy import __main__ as entry
from mjp_privacy import cli
from mjp_privacy.core import stop
stop.GRACE = 5.0

def command(argv, usage):
{body}

sys.modules["made"] = types.SimpleNamespace(command=command)
cli.COMMANDS = {{"made": cli.CommandEntry("made:command", example="made")}}
sys.argv = ["mjp", "made"]
raise SystemExit(entry.main())
"""


def ended(
    body: str,
    *numbers: signal.Signals,
    ignored: tuple[signal.Signals, ...] = (),
    before: float = 0.0,
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process whose command has this body, which prints "ready"
    where it waits, and gets these signals then.

    ignored  as by nohup and a shell's background
    before   seconds between "ready" and the first signal
    """

    def hear() -> None:
        for number in CODES:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY.format(body=lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
        time.sleep(before)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors
    finally:
        process.kill()
        process.wait()


def is_the_stop(number: signal.Signals, code: int, errors: str) -> bool:
    """Whether a command ended with the signal's code and one line that names it."""
    return code == CODES[number] and errors.count("\n") == 1 and NAMES[number] in errors


WAITS = """
import time
print("ready", flush=True)
time.sleep(60)
return 0
"""
CLEANS_UP = """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    time.sleep(0.3)
    print("tidied", flush=True)
"""


@pytest.mark.parametrize("number", CODES)
def test_a_stop_is_one_line_and_its_code(number: signal.Signals) -> None:
    waits = number != signal.SIGINT  # other signals leave no time to clean up
    code, output, errors = ended(WAITS if waits else CLEANS_UP, number)
    assert is_the_stop(number, code, errors)
    assert output == ("" if waits else "tidied\n")


TURNED = """
import time, warnings
print("ready", flush=True)
try:
    time.sleep(60)
except BaseException as error:
    warnings.warn("numpy is not there")
    raise ImportError("numpy could not be imported") from None
"""
COMPILED = """
import hashlib
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in compiled code, deaf to signals
"""


def test_whatever_a_library_makes_of_the_stop_it_is_the_stop(tmp_path: Path) -> None:
    """Also while it is imported."""
    (tmp_path / "slow_module.py").write_text(TURNED)
    body = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport slow_module\nreturn 0"
    code, _, errors = ended(body, signal.SIGTERM)
    assert is_the_stop(signal.SIGTERM, code, errors)


@pytest.mark.nightly
def test_one_signal_ends_compiled_code_after_a_grace() -> None:
    code, _, errors = ended(COMPILED, signal.SIGTERM)
    assert is_the_stop(signal.SIGTERM, code, errors)


def test_a_second_signal_ends_at_once_even_compiled_code() -> None:
    code, _, errors = ended(COMPILED, signal.SIGINT, signal.SIGTERM, before=0.5)
    assert code == CODES[signal.SIGTERM]
    assert "second signal" in errors


LATE = """
import atexit, time
atexit.register(lambda: (print("ready", flush=True), time.sleep(1)))
return 3
"""
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


def test_signals_that_are_not_for_the_command_change_nothing() -> None:
    """After its work; those of a child that it forked; Ctrl-C in a shell's background."""
    assert ended(LATE, signal.SIGTERM) == (3, "", "")
    assert ended(FORKS) == (5, "", "")
    brief = CLEANS_UP.replace("sleep(60)", "sleep(1)")
    assert ended(brief + "return 0", signal.SIGINT, ignored=(signal.SIGINT,))[::2] == (0, "")
