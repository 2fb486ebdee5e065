"""Files are complete or absent, whoever writes into a folder, and what killed writers left goes."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from mjp_privacy.core import files
from mjp_privacy.core.errors import BadFile, StorageError, UserError
from mjp_privacy.core.files import (
    append_json_line,
    lock,
    output_file,
    output_folder,
    sweep,
    watch_folder,
    working_in,
    write_atomically,
    write_json,
)
from mjp_privacy.core.read import FileKind, json_lines, read_json_lines

LINES = FileKind("lines of JSON", "Delete them.")
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
    with lock(tmp_path):
        assert not list(target.parent.iterdir())


def test_which_temporary_files_are_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = {
        f".x.parquet.{ended.pid}@elsewhere.tmp": False,  # for a day
        f".old.parquet.{ended.pid}@elsewhere.tmp": True,
        f".x.parquet.{os.getpid()}@{files.HOST}.tmp": False,
        f".x.parquet.{ended.pid}@{files.HOST}.tmp": True,
        ".x.tmp": False,
        ".notes.v2.tmp": False,
        "x.1@a.tmp": False,
    }
    for name in names:
        (tmp_path / name).touch()
    yesterday = time.time() - files.DAY - 60
    os.utime(tmp_path / f".old.parquet.{ended.pid}@elsewhere.tmp", (yesterday, yesterday))
    (tmp_path / f".y.{ended.pid}@{socket.gethostname()}.tmp").mkdir()
    sweep(tmp_path)
    assert {name: not (tmp_path / name).exists() for name in names} == names
    assert (tmp_path / f".y.{ended.pid}@{socket.gethostname()}.tmp").is_dir()


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_who_may_read_is_what_the_umask_says(tmp_path: Path, mask: int) -> None:
    def write(path: Path) -> None:
        path.unlink()
        path.touch(0o600)  # as safetensors does

    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file", write)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_only_one_command_works_in_a_folder(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(UserError, match=str(tmp_path)):
        lock(tmp_path).__enter__()
    (tmp_path / "other" / ".lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"\.lock"), lock(tmp_path / "other"):
        pass


# a folder that is taken away ---------------------------------------------------------------------


def taken_away(run: Path) -> None:
    shutil.rmtree(run)


def replaced(run: Path) -> None:
    run.rename(run.with_name("moved"))
    with lock(run):
        pass


def emptied(run: Path) -> None:
    (run / ".lock").unlink()


@pytest.mark.parametrize("what_happens", [taken_away, replaced, emptied])
def test_nothing_is_written_into_a_folder_that_is_not_the_same(
    tmp_path: Path, what_happens: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_folders", {})
    run = tmp_path / "run"
    with ExitStack() as stack:
        stack.enter_context(lock(run))
        write_json(run / "rows" / "0.json", [])
        what_happens(run)
        with pytest.raises(StorageError, match="run"):
            write_json(run / "rows" / "1.json", [])
        with pytest.raises(StorageError, match="run"):  # also where nothing is written any more
            stack.close()
    assert not (run / "rows" / "1.json").exists()
    assert files.working_folders() == ()


def test_a_report_and_a_worker_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_folders", {})
    (tmp_path / "report").mkdir()
    with pytest.raises(StorageError, match="report"), working_in(tmp_path / "report"):
        (tmp_path / "report").rmdir()
    with lock(tmp_path / "run"):
        pass
    watch_folder(tmp_path / "run")
    write_json(tmp_path / "run" / "a.json", [])
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageError, match="run"):
        write_json(tmp_path / "run" / "b.json", [])
    assert not (tmp_path / "run").exists()


# --out -------------------------------------------------------------------------------------------


def test_an_output_is_tried_before_work_begins(tmp_path: Path) -> None:
    assert output_file(tmp_path / "new" / "scores.csv") == tmp_path / "new" / "scores.csv"
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(UserError, match="new"):
        output_file(tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        output_folder(tmp_path / "file" / "inside")


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/x", "s3://bucket/run", "file:///tmp/x"])
def test_an_output_folder_is_no_address(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--out"):
        output_folder(Path(address))
    assert not list(tmp_path.iterdir())
    assert output_folder(Path("run:1/x")).is_dir()


# lines of JSON -----------------------------------------------------------------------------------

RECORDS = [{"stage": f"s {number}", "seconds": number / 7} for number in range(20)]


def test_lines_come_back_and_no_changed_bit_is_taken_for_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for fields in RECORDS:
        append_json_line(path, fields)
    content = path.read_bytes()
    assert read_json_lines(path, LINES) == RECORDS
    assert json.loads(content.splitlines()[0])["stage"] == "s 0"
    for at in random.Random(2).sample(range(8 * len(content)), 300):
        changed = bytearray(content)
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        objects, damaged = json_lines(path, LINES)
        assert damaged or changed[-1:] != b"\n", at
        assert all(fields in RECORDS for fields in objects)
        assert len(objects) >= len(RECORDS) - 2
    path.write_bytes(content.replace(b"s 19", b"s 18"))
    with pytest.raises(BadFile, match="line 20"):
        read_json_lines(path, LINES)
