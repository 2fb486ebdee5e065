"""Commands in odd surroundings: closed streams, a deleted folder, little room for addresses."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shells of Unix")
MJP = f"{sys.executable} -m mjp_privacy"


def called(line: str, folder: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a line of bash."""
    ended = subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=120
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_without_a_stream_ends_as_with_it(tmp_path: Path, closed: str) -> None:
    assert called(f"{MJP} list attacks {closed}", tmp_path)[0] == 0
    assert called(f"{MJP} list attakcs {closed}", tmp_path)[0] == 2


PRINTING = """
import os, subprocess, sys
from mjp_privacy.core import streams
streams.fill()
child = "import os; os.fstat(0); os.fstat(1); os.fstat(2)"
subprocess.run([sys.executable, "-c", child], check=True)
with open("kept", "wb") as file:
    print("lost", flush=True)
    os.write(1, b"lost")
    file.write(b"kept")
"""


def test_what_is_printed_to_a_closed_stream_is_in_no_file(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PRINTING)
    code, _, said = called(f"{sys.executable} program.py >&-", tmp_path)
    assert (code, said) == (0, "")
    assert (tmp_path / "kept").read_bytes() == b"kept"


@pytest.mark.parametrize("words", ["list", "attack configs/demo.yaml --out run"])
def test_a_current_folder_that_was_deleted_is_said(tmp_path: Path, words: str) -> None:
    code, _, said = called(f"mkdir a && cd a && rmdir ../a && {MJP} {words}", tmp_path)
    assert code == 2
    assert said.startswith("error: The current folder cannot be used: expected a folder")
    assert said.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit addresses")
def test_too_few_addresses_for_the_libraries_are_said_before_they_are_loaded(
    tmp_path: Path,
) -> None:
    code, _, said = called(f"ulimit -v 1000000; {MJP} list attacks", tmp_path)
    assert code == 71
    assert said.startswith("error: memory ran out (ulimit -v allows 1.0 GiB of addresses, and ")
    assert "Raise the limit with ulimit -v; then" in said
    assert said.count("\n") == 1
