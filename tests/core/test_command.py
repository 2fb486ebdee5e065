"""Whatever a command raises, in any surroundings, is one line and an exit code, and so is whatever
stops it: Ctrl-C, SIGTERM and SIGHUP; and progress."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from mjp_privacy.core import progress
from mjp_privacy.core.command import Usage, answered
from mjp_privacy.core.errors import StorageError, UserError
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.read import FileKind, read_json_lines

USAGE = Usage("mjp something", "mjp something", "the same command goes on from here")


def ended(capsys: pytest.CaptureFixture[str], error: BaseException, *argv: str) -> tuple[int, str]:
    """Exit code and what stands on stderr, which is one line; nothing stands on stdout."""

    def command(argv: list[str], usage: Usage) -> int:
        raise error

    code = answered(lambda: command, list(argv), USAGE)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "\x1b" not in printed.err
    return code, printed.err


ENDS: list[tuple[BaseException, int, str]] = [
    (UserError("Expected 1, got \x1b[31m2."), 2, r"\x1b[31m2"),
    (KeyboardInterrupt(), 130, "Ctrl-C"),
    (StorageError.of("run/rows/a.parquet", errno.ENOSPC), 74, "run/rows/a.parquet"),
    (OSError(errno.EIO, "Input/output error", "a\x1b[2Jb"), 74, r"a\x1b[2Jb"),
    (FileNotFoundError(errno.ENOENT, "No such file", "/nowhere/run/log"), 74, "/nowhere/run/log"),
    (OSError(errno.ENOSPC, "No space left on device"), 74, "the output"),
    (MemoryError("Unable to allocate 9 PiB"), 71, "9 PiB"),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 71, "libtorch"),
    (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"), 71, "2 GiB"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 71, "Cannot allocate"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 71, "DefaultCPUAllocator"),
]


@pytest.mark.parametrize(("error", "code", "named"), ENDS)
def test_each_kind_of_error_has_its_code_and_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, named: str
) -> None:
    got, line = ended(capsys, error)
    assert got == code
    assert named in line
    assert code == 2 or USAGE.again in line


@pytest.mark.parametrize(
    "error",
    [
        TypeError("'int' is no\nname"),
        SystemExit(0),
        FileNotFoundError(errno.ENOENT, "No such file", "/etc/nothing"),
    ],
)
def test_anything_else_is_a_fault_with_its_traceback_in_a_file_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MJP_SECRET", "of-the-environment")
    before = os.umask(0o027)
    try:
        code, line = ended(capsys, error, "photos of mine", "--out", "run")
        ended(capsys, error)
    finally:
        os.umask(before)
    assert code == 70
    assert type(error).__name__ in line
    file = Path(line.strip().rpartition(" ")[2])
    report = file.read_text()
    assert report.startswith("command: mjp something 'photos of mine' --out run\n")
    assert "Traceback (most recent call last)" in report
    assert "of-the-environment" not in report
    assert file.stat().st_mode & 0o777 == 0o640
    assert len(list(tmp_path.iterdir())) == 2


def test_a_path_of_the_command_line_that_does_not_fit_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = f"{tmp_path}/file/report"
    error = NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
    (tmp_path / "file").touch()
    for words in (["--out", path], [f"--out={tmp_path}/file"]):
        code, line = ended(capsys, error, *words)
        assert code == 2
        assert path in line
    assert ended(capsys, error, "--out", str(tmp_path / "other"))[0] == 70


# surroundings ------------------------------------------------------------------------------------

MJP = f"{sys.executable} -m mjp_privacy"


PRINTING = """
import os, subprocess, sys
from mjp_privacy.__main__ import open_missing_streams
open_missing_streams()
child = "import os; os.fstat(0); os.fstat(1); os.fstat(2)"
subprocess.run([sys.executable, "-c", child], check=True)
with open("kept", "wb") as file:
    print("lost", flush=True)
    os.write(1, b"lost")
    file.write(b"kept")
"""


def shell(line: str, folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a line of bash."""
    command = ["bash", "-c", line]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def test_a_command_without_streams_ends_as_with_them_and_writes_into_no_other_file(
    tmp_path: Path,
) -> None:
    assert shell(f"{MJP} list attacks >&-", tmp_path)[0] == 0
    assert shell(f"{MJP} list attakcs <&- >&- 2>&-", tmp_path)[0] == 2
    (tmp_path / "program.py").write_text(PRINTING)
    assert shell(f"{sys.executable} program.py >&-", tmp_path) == (0, "")
    assert (tmp_path / "kept").read_bytes() == b"kept"


def test_a_deleted_folder_to_stand_in(tmp_path: Path) -> None:
    code, errors = shell(f"mkdir a && cd a && rmdir ../a && {MJP} list", tmp_path)
    assert (code, errors.count("\n"), "cd" in errors) == (2, 1, True)


# progress -----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_comes_every_ten_seconds_and_what_is_said_is_logged(
    clock: list[float], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its speed is that of fresh units, its time that of those left."""
    with Progress("attack", 1100, "images", tmp_path / "log.jsonl") as run:
        run.say("loaded [brackets]", missing=["unk_embed"])
        run.skip(1000)
        for _ in range(10):
            clock[0] += 3
            run.advance(3, "work")
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "loaded [brackets]"
    assert [line.split(" · ")[0] for line in lines] == [
        f"work: {n}/1100" for n in (1012, 1024, 1030)
    ]
    assert run.figures() == "1030/1100 · 1.0 images/s · 1 min 10 s left"
    (entry,) = read_json_lines(tmp_path / "log.jsonl", FileKind("a log", "Delete it."))
    assert (entry["message"], entry["missing"]) == ("loaded [brackets]", ["unk_embed"])


def test_what_takes_long_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL", 0.2)
    with progress.doing() as begin:
        begin("a short one")
        begin("a long one")
        time.sleep(0.6)
    assert capsys.readouterr().err.splitlines() == ["a long one"]


# stops -------------------------------------------------------------------------------------------

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


def stopped(
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
    code, output, errors = stopped(WAITS if waits else CLEANS_UP, number)
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
    code, _, errors = stopped(body, signal.SIGTERM)
    assert is_the_stop(signal.SIGTERM, code, errors)


@pytest.mark.nightly
def test_one_signal_ends_compiled_code_after_a_grace() -> None:
    code, _, errors = stopped(COMPILED, signal.SIGTERM)
    assert is_the_stop(signal.SIGTERM, code, errors)


def test_a_second_signal_ends_at_once_even_compiled_code() -> None:
    code, _, errors = stopped(COMPILED, signal.SIGINT, signal.SIGTERM, before=0.5)
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
    assert stopped(LATE, signal.SIGTERM) == (3, "", "")
    assert stopped(FORKS) == (5, "", "")
    brief = CLEANS_UP.replace("sleep(60)", "sleep(1)")
    assert stopped(brief + "return 0", signal.SIGINT, ignored=(signal.SIGINT,))[::2] == (0, "")
