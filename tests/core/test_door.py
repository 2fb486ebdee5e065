"""The last door of a command: whatever it raises is one line and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mjp_privacy.core.command import ANEW, Command, Usage, answered
from mjp_privacy.core.errors import StorageError, UserError

USAGE = Usage("mjp something", "mjp something", "the same command goes on from here")
GO_ON = "then the same command goes on from here"


def ended_by(error: BaseException) -> Callable[[], Command]:
    """A command that raises this."""

    def command(argv: list[str], usage: Usage) -> int:
        raise error

    return lambda: command


def said(capsys: pytest.CaptureFixture[str], error: BaseException, *argv: str) -> tuple[int, str]:
    """Exit code and what stands on stderr; nothing stands on stdout."""
    code = answered(ended_by(error), list(argv), USAGE)
    printed = capsys.readouterr()
    assert printed.out == ""
    return code, printed.err


class _Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("Expected 1,\ngot \x1b[31m2."), 2, "error: Expected 1,\ngot \\x1b[31m2.\n"),
        (KeyboardInterrupt(), 130, f"stopped by Ctrl-C; {USAGE.again}\n"),
        (
            StorageError.of("run/rows/a.parquet", errno.ENOSPC),
            74,
            "error: run/rows/a.parquet cannot be written (no space left on device). "
            f"Free some space; {GO_ON}\n",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "run/log.jsonl"),
            74,
            "error: run/log.jsonl cannot be written (read-only file system). "
            f"Make the file system writable or take another place; {GO_ON}\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "run/.lock"),
            74,
            "error: run/.lock cannot be written (permission denied). "
            f"Get write access there or take another place; {GO_ON}\n",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            74,
            "error: the output cannot be written (too many open files). "
            f"Raise the limit on open files (ulimit -n); {GO_ON}\n",
        ),
        (
            OSError(errno.EIO, "Input/output error", "a\x1b[2Jb"),
            74,
            "error: a\\x1b[2Jb cannot be written (input/output error). "
            f"See whether the disk or network is well; {GO_ON}\n",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/nowhere/run/log.jsonl"),
            74,
            "error: /nowhere/run/log.jsonl cannot be written (no such file or directory). "
            f"Leave the folder where it is while a command works in it; {GO_ON}\n",
        ),
        (
            MemoryError("Unable to allocate 9 PiB"),
            71,
            "error: memory ran out (Unable to allocate 9 PiB). Close other programs or take less "
            f"at once; {GO_ON}\n",
        ),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            71,
            "error: memory ran out (libtorch_cpu.so: failed to map segment from shared object). "
            f"Close other programs or take less at once; {GO_ON}\n",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
            71,
            "error: memory ran out (CUDA out of memory. Tried to allocate 2 GiB). Close other "
            f"programs or take less at once; {GO_ON}\n",
        ),
    ],
)
def test_each_kind_of_error_has_its_line_and_its_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    assert said(capsys, error) == (code, words)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TypeError("'int' is no\nname"), "TypeError: 'int' is no name"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (SystemExit(0), "SystemExit: 0"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/etc/nothing"), "FileNotFoundError: "),
        (AssertionError("\x1b]0;title\x07"), "AssertionError: \\x1b]0;title\\x07"),
        (_Odd(), "_Odd"),
        (RecursionError("maximum recursion depth"), "RecursionError: maximum recursion depth"),
        (GeneratorExit(), "GeneratorExit"),
    ],
)
def test_anything_else_is_a_fault_with_its_traceback_in_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    words: str,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MJP_SECRET", "of-the-environment")
    mask = os.umask(0o027)
    try:
        code, line = said(capsys, error, "photos of mine", "--out", "run")
    finally:
        os.umask(mask)
    assert code == 70
    assert line.startswith(f"a fault of mjp-privacy, please report: {words}")
    assert line.count("\n") == 1
    assert line.isprintable() or line[:-1].isprintable()
    [file] = tmp_path.iterdir()
    assert line.endswith(f"; the traceback is in {file}\n")
    report = file.read_text()
    assert "command: mjp something 'photos of mine' --out run\n" in report
    assert f"torch {torch.__version__}" in report
    assert f"Python {sys.version.split()[0]}" in report
    assert "Traceback (most recent call last)" in report
    assert "in command\n    raise error" in report
    assert "of-the-environment" not in report
    assert file.stat().st_mode & 0o777 == 0o640  # as the umask says


def test_a_fault_is_shown_where_no_file_can_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    code, text = said(capsys, TypeError("broken"))
    assert code == 70
    first, second, *_ = text.splitlines()
    line = "a fault of mjp-privacy, please report: TypeError: broken; the traceback follows"
    assert first == line
    assert second == "command: mjp something"
    assert text.endswith("TypeError: broken\n\n")


def test_two_faults_have_two_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said(capsys, TypeError())
    said(capsys, TypeError())
    assert len(list(tmp_path.iterdir())) == 2


def test_errors_of_the_commands_own_imports_pass_the_same_door(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def load() -> Command:
        raise ImportError("libtorch.so: cannot open shared object file")

    assert answered(load, [], USAGE) == 70
    assert "ImportError: libtorch.so: cannot open" in capsys.readouterr().err


def test_a_path_of_the_command_line_that_does_not_fit_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "report" / "table.md"
    try:
        below.parent.mkdir(parents=True)
    except OSError as caught:
        error = caught
    code, line = said(capsys, error, "--out", str(tmp_path / "file" / "report"))
    assert (code, line.count("\n")) == (2, 1)
    assert line.endswith("/file/report cannot be used (not a directory). Give another path.\n")
    assert said(capsys, error, f"--out={tmp_path / 'file'}")[0] == 2
    (tmp_path / "table.md").mkdir()
    (tmp_path / ".table.md.tmp").touch()
    try:
        (tmp_path / ".table.md.tmp").replace(tmp_path / "table.md")
    except OSError as caught:
        renamed = caught
    code, line = said(capsys, renamed, "report", "run", "--out", str(tmp_path))
    assert code == 2
    assert line.endswith("/table.md cannot be used (is a directory). Give another path.\n")
    code, line = said(capsys, error, "--out", str(tmp_path / "other"))
    assert code == 70  # no path of the user's: whose mistake is it then?
    Path(line.strip().rpartition(" ")[2]).unlink()


def test_output_without_room_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = said(capsys, OSError(errno.ENOSPC, "No space left on device"))
    assert code == 74
    assert line.startswith("error: the output cannot be written (no space left on device). Free")


def test_what_the_same_command_does_afterwards_is_told_by_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = Usage("mjp list", "mjp list")
    assert answered(ended_by(KeyboardInterrupt()), [], usage) == 130
    assert capsys.readouterr().err == f"stopped by Ctrl-C; {ANEW}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--name", ""], "--name: expected a value, got an empty text"),
        (["--name="], "--name: expected a value, got an empty text"),
        (["--name", "x" * 2001], "expected at most 2000 characters, got 2001"),
        (["--name", "a\x1b[2Jb"], "a\\x1b[2Jb: expected no control characters"),
    ],
)
def test_words_that_nobody_can_read_are_refused_before_they_are_parsed(
    words: list[str], expected: str
) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        USAGE.parse(_Named, words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--name", "~/run"], "/home/me/run"),
        (["--name=~/run"], "/home/me/run"),
        (["--name", "ViT=~/vit.pth"], "ViT=/home/me/vit.pth"),
        (["--name", "a~b"], "a~b"),
    ],
)
def test_a_tilde_is_the_home_folder_whether_the_shell_replaced_it_or_not(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert USAGE.parse(_Named, words).name == expected


@dataclass
class _Named:
    """A command with one option."""

    name: str = "x"
