"""Files are complete or absent, whoever writes into a folder, and what killed writers left goes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjp_privacy.core import files
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import (
    abandoned,
    appending,
    lock,
    output_file,
    output_folder,
    write_atomically,
)

WRITER = """
import sys, time
from pathlib import Path
from mjp_privacy.core.files import write_atomically

def write(temporary):
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)

write_atomically(Path(sys.argv[1]), write)
"""


def temporary_name(path: Path) -> str:
    """The name under which this process writes a file."""
    seen: list[str] = []

    def write(temporary: Path) -> None:
        seen.append(temporary.name)
        temporary.write_text("whole")

    write_atomically(path, write)
    return seen[0]


def test_a_temporary_file_names_its_process_and_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node_7.site.org")
    name = temporary_name(tmp_path / "00003.parquet")
    assert name == f".00003.parquet.{os.getpid()}@node-7-site-org.tmp"
    assert [path.name for path in tmp_path.iterdir()] == ["00003.parquet"]


def test_two_machines_with_equal_process_numbers_write_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    for host in ("node1", "node2"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(temporary_name(tmp_path / "x"))
    assert len(names) == 2


def test_a_file_that_somebody_writes_stays_and_goes_when_he_is_killed(tmp_path: Path) -> None:
    target = tmp_path / "rows" / "x.parquet"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "writing\n"
        with lock(tmp_path):
            assert [path.read_text() for path in target.parent.iterdir()] == ["half"]
    finally:
        writer.kill()
        writer.wait()
    assert len(list(abandoned(tmp_path))) == 1
    with lock(tmp_path):
        assert not list(target.parent.iterdir())


def ended_process() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_files_of_other_machines_stay_for_a_day(tmp_path: Path) -> None:
    young, old = (tmp_path / f".{name}.parquet.{ended_process()}@elsewhere.tmp" for name in "ab")
    for path in (young, old):
        path.touch()
    yesterday = time.time() - files.DAY - 60
    os.utime(old, (yesterday, yesterday))
    assert list(abandoned(tmp_path)) == [old]


def test_a_number_that_another_process_has_now_keeps_a_file_for_a_day(tmp_path: Path) -> None:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    path = tmp_path / f".x.parquet.{os.getpid()}@{host}.tmp"
    path.touch()
    assert not list(abandoned(tmp_path))
    yesterday = time.time() - files.DAY - 60
    os.utime(path, (yesterday, yesterday))
    assert list(abandoned(tmp_path)) == [path]


@pytest.mark.parametrize("name", [".00000.parquet.1.tmp", ".cells.json.77.tmp", ".x.1.tmp"])
def test_names_of_earlier_versions_hold_no_machine_and_are_abandoned(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).touch()
    assert [path.name for path in abandoned(tmp_path)] == [name]


@pytest.mark.parametrize("name", [".x.tmp", ".notes.v2.tmp", ".a.b@c.tmp", ".1.tmp", "x.1.tmp"])
def test_hidden_files_of_others_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / name).write_text("mine")
    (tmp_path / f".x.{ended_process()}@{socket.gethostname()}.tmp").mkdir()
    assert not list(abandoned(tmp_path))
    with lock(tmp_path):
        assert (tmp_path / "kept" / name).read_text() == "mine"


def test_a_folder_in_place_of_the_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    said = r"/\.lock: expected the file that locks this folder, got a folder\. Take it away, or"
    with pytest.raises(UserError, match=said), lock(tmp_path):
        pass


def test_lines_are_added_to_files_alone(tmp_path: Path) -> None:
    with appending(tmp_path / "new") as file:
        file.write(b"one\n")
    with appending(tmp_path / "new") as file:
        file.write(b"two\n")
    assert (tmp_path / "new").read_text() == "one\ntwo\n"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"pipe: expected a file that lines .* got a named pipe"):
        appending(tmp_path / "pipe")


@pytest.mark.skipif(sys.platform != "linux", reason="a folder of /proc")
def test_a_folder_in_which_no_file_can_be_made_is_refused() -> None:
    with pytest.raises(UserError, match="expected a folder in which files can be made, got /proc"):
        output_file(Path("/proc/self/scores.csv"))


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/x", "s3://bucket/run", "file:///tmp/x"])
def test_an_output_folder_is_no_address(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="expected a folder of this machine, got an address"):
        output_folder(Path(address))
    assert not list(tmp_path.iterdir())
    assert output_folder(Path("run:1/x")).is_dir()


def test_an_output_folder_has_a_name_that_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latin = os.fsdecode(b"caf\xe9")
    with pytest.raises(UserError, match=r"--out .*expected a name in UTF-8"):
        output_folder(tmp_path / latin)
    assert not (tmp_path / latin).exists()
    (tmp_path / latin).mkdir()
    monkeypatch.chdir(tmp_path / latin)  # where one stands is one's own affair
    assert output_folder(Path.cwd() / "out").is_dir()
    assert output_folder(Path("more")).is_dir()
