"""Ctrl-C, SIGTERM and SIGHUP: one line, 130, 143 or 129, wherever a command is."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.trap import is_running, until

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
LINES = {
    signal.SIGINT: "stopped by Ctrl-C; the same command starts anew\n",
    signal.SIGTERM: "stopped by SIGTERM; the same command starts anew\n",
    signal.SIGHUP: "stopped by SIGHUP; the same command starts anew\n",
}
BOTH = pytest.mark.parametrize("number", CODES)

ENTRY = """
import sys, types
from mjp_privacy import __main__ as entry
from mjp_privacy import cli
from mjp_privacy.core.registry import Entry

def command(argv, usage):
{body}

sys.modules["made"] = types.SimpleNamespace(command=command)
cli.COMMANDS = {{"made": cli.CommandEntry("made:command", example="made")}}
sys.argv = ["mjp", "made"]
raise SystemExit(entry.main())
"""


class Made:
    """A process whose command has this body; it prints "ready" where it waits."""

    def __init__(self, body: str) -> None:
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENTRY.format(body=lines)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_interrupts,
        )

    def __enter__(self) -> Made:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def signalled(self, *numbers: signal.Signals, pause: float = 0.1) -> tuple[int, str]:
        """Send signals; the exit code and what stood on stderr."""
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(pause)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def _hear_interrupts() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # as nohup and a shell's background ignore them
        signal.signal(number, signal.SIG_DFL)


WAIT = """
import time
print("ready", flush=True)
time.sleep(60)
return 0
"""


@BOTH
def test_a_stop_is_one_line_and_its_code(number: signal.Signals) -> None:
    with Made(WAIT) as made:
        assert made.signalled(number) == (CODES[number], LINES[number])


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


@pytest.mark.parametrize("body", [SWALLOWED, TURNED, IN_A_THREAD])
def test_whatever_a_library_makes_of_the_stop_it_is_the_stop(body: str) -> None:
    with Made(body) as made:
        assert made.signalled(signal.SIGTERM) == (143, LINES[signal.SIGTERM])


CLEANS_UP = """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    time.sleep(1)
    print("tidied", flush=True)
"""


def test_cleaning_up_is_not_interrupted_by_the_same_stop() -> None:
    with Made(CLEANS_UP) as made:
        made.process.send_signal(signal.SIGINT)
        output, errors = made.process.communicate(timeout=60)
    assert (made.process.returncode, output, errors) == (130, "tidied\n", LINES[signal.SIGINT])


COMPILED = """
import hashlib
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in compiled code, deaf to signals
"""


@pytest.mark.parametrize(
    ("numbers", "code"),
    [((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGINT, signal.SIGTERM), 143)],
)
def test_a_second_signal_ends_at_once_even_compiled_code(
    numbers: tuple[signal.Signals, ...], code: int
) -> None:
    with Made(COMPILED) as made:
        time.sleep(0.5)
        said = made.signalled(*numbers, pause=0.5)
    assert said == (code, "stopped at once by a second signal\n")


LATE = """
import atexit, time
atexit.register(lambda: (print("ready", flush=True), time.sleep(1)))
return 3
"""


@BOTH
def test_a_signal_after_the_work_changes_nothing(number: signal.Signals) -> None:
    with Made(LATE) as made:
        assert made.signalled(number) == (3, "")


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
        _, errors = made.process.communicate(timeout=60)
        assert (made.process.returncode, errors) == (5, "")


def test_a_shells_background_goes_on_ignoring_ctrl_c() -> None:
    body = WAIT.replace("sleep(60)", "sleep(1)")
    made = Made.__new__(Made)
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    made.process = subprocess.Popen(
        [sys.executable, "-c", ENTRY.format(body=lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    with made:
        assert made.signalled(signal.SIGINT) == (0, "")


def test_who_imports_the_package_gets_no_handlers() -> None:
    code = (
        "import signal\n"
        "numbers = (signal.SIGTERM, signal.SIGINT)\n"
        "before = [signal.getsignal(number) for number in numbers]\n"
        "import mjp_privacy, mjp_privacy.cli, mjp_privacy.core.stops\n"
        "mjp_privacy.cli.main(['--version'])\n"
        "assert [signal.getsignal(number) for number in numbers] == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_handlers_that_a_library_installs_are_taken_back() -> None:
    from mjp_privacy.core import stop

    before = signal.getsignal(signal.SIGTERM)
    with stop.kept():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as ray.init does
    assert signal.getsignal(signal.SIGTERM) is before


IMPORTS = """
import sys
from pathlib import Path
folder = Path({folder!r})
sys.path.insert(0, str(folder))
import slow_module
return 0
"""
SLOW = """
import time
print("ready", flush=True)
try:
    time.sleep({seconds})
except BaseException:
    raise ImportError("a compiled module turns it into this") from None
print("imported", flush=True)
"""


def test_a_signal_during_an_import_ends_the_command_there(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW.format(seconds=60))
    with Made(IMPORTS.format(folder=str(tmp_path))) as made:
        assert made.signalled(signal.SIGTERM) == (143, LINES[signal.SIGTERM])


def test_a_signal_during_an_import_waits_where_something_must_be_tidied(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW.format(seconds=0.5))
    body = IMPORTS.format(folder=str(tmp_path)).replace(
        "import slow_module",
        "from mjp_privacy.core.files import write_atomically\n"
        "def write(path):\n"
        "    path.touch()\n"
        "    import slow_module\n"
        "    import time\n"
        "    time.sleep(60)\n"
        "write_atomically(folder / 'scores.csv', write)",
    )
    with Made(body) as made:
        made.process.send_signal(signal.SIGINT)
        output, errors = made.process.communicate(timeout=60)
    assert (made.process.returncode, output, errors) == (130, "imported\n", LINES[signal.SIGINT])
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["slow_module.py"]


# real commands at random moments; many more by tools/crash-test -----------------------------------


@pytest.mark.parametrize("words", [["list"], ["--help"], ["attack", "demo", "--help"]])
def test_a_short_command_at_random_moments(words: list[str]) -> None:
    dice = random.Random(" ".join(words))
    for number in (*CODES, *CODES):
        process = subprocess.Popen(
            [sys.executable, "-m", "mjp_privacy", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_interrupts,
        )
        until(_answers(process), 60)
        time.sleep(dice.uniform(0, 0.8))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (0, CODES[number]), errors
        assert "Traceback" not in errors
        assert errors.count("stopped by") == (process.returncode != 0)
        assert not is_running(process.pid)


def _answers(process: subprocess.Popen[str]) -> Callable[[], bool | None]:
    """Whether the command has begun to listen: before, the interpreter itself starts."""

    def ask() -> bool | None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        mask = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(mask >> (signal.SIGTERM - 1) & 1) or process.poll() is not None or None

    return ask
