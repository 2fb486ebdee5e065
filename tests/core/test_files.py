"""Files are complete or absent, whoever writes into a folder, and what killed writers left goes."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mjp_privacy.core import files
from mjp_privacy.core.errors import (
    BadFile,
    StorageError,
    UserError,
    format_error,
    storage_error,
    writing,
)
from mjp_privacy.core.files import (
    append_json_line,
    check_disk,
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


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        files, "fsync", lambda path: brought.append((path.name, (tmp_path / "x").exists()))
    )
    write_atomically(tmp_path / "x", lambda file: file.write_text("1"), durable=True)
    [(temporary, early), folder] = brought
    assert (temporary.startswith(".x."), early) == (True, False)
    assert folder == (tmp_path.name, True)
    write_atomically(tmp_path / "y", lambda file: file.write_text("1"))
    assert len(brought) == 2


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


def test_what_a_kill_left_of_a_line_goes_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for start in (b"", files.json_line(RECORDS[0]).encode()):
        path.write_bytes(start + b'{"stage": "half')
        before = json_lines(path, LINES)
        append_json_line(path, RECORDS[1])
        assert json_lines(path, LINES) == ([*before[0], RECORDS[1]], [])


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile, match="pipe"):
        append_json_line(tmp_path / "pipe", {})


# disks that do not take what is written -----------------------------------------------------------


ROOM = 1 << 17  # bytes of the small disk, less than what each writer wants


def mounted(*options: str) -> bool:
    return subprocess.run(["mount", *options], capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 128 KiB."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    if not mounted("-t", "tmpfs", "-o", f"size={ROOM}", "small", str(place)):
        pytest.skip("this machine does not let a tmpfs be mounted")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


NOISE = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0))
WRITERS: dict[str, Callable[[Path], object]] = {
    "bytes": lambda path: path.write_bytes(bytes(1 << 20)),
    "safetensors": lambda path: save_file({"a": NOISE}, path),
    "torch": lambda path: torch.save({"a": NOISE}, path),
    "pyarrow": lambda path: pd.DataFrame({"a": NOISE.numpy()}).to_parquet(path),
    "Pillow": lambda path: Image.frombytes(
        "L", (512, 512), NOISE.numpy().tobytes()[: 1 << 18]
    ).save(path, "png"),
    "pandas' CSV": lambda path: pd.DataFrame({"a": NOISE.numpy()}).to_csv(path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_told_by_every_library_alike(disk: Path, writer: str) -> None:
    path = disk / "rows" / "a.file"
    with pytest.raises(StorageError, match=r"a\.file") as caught:
        write_atomically(path, WRITERS[writer])
    assert caught.value.errno == errno.ENOSPC
    del caught
    gc.collect()  # torch's writer holds its file open
    assert [name for name in disk.rglob("*") if name.is_file()] == []
    write_json(disk / "small.json", [1, 2])  # what was half written is gone again


@pytest.mark.parametrize("writer", WRITERS)
def test_a_limit_on_the_size_of_files_is_told(tmp_path: Path, writer: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        with pytest.raises(StorageError, match=r"a\.file"):
            write_atomically(tmp_path / "a.file", WRITERS[writer])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_disk_is_told(disk: Path) -> None:
    (disk / "run").mkdir()
    assert mounted("-o", "remount,ro", str(disk))
    for write in (
        lambda: write_json(disk / "run" / "a.json", {}),
        lambda: output_folder(disk / "new"),
        lambda: lock(disk / "run").__enter__(),
        lambda: check_disk(disk / "run"),
    ):
        with pytest.raises(StorageError) as caught:
            write()
        assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space"), 28),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 28),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), 28),
        (OSError("encoder error -2 when writing image file"), 28),
        (PermissionError(errno.EACCES, "Permission denied", "a"), errno.EACCES),
    ],
)
def test_libraries_words_are_understood(tmp_path: Path, error: Exception, number: int) -> None:
    with pytest.raises(StorageError, match=str(tmp_path)) as caught, writing(tmp_path / "a"):
        raise error
    assert caught.value.errno == number


@pytest.mark.parametrize(
    "error", [ValueError("5 rows"), RuntimeError("shapes differ"), UserError("no"), KeyError(1)]
)
def test_errors_of_other_kinds_pass(error: Exception) -> None:
    with pytest.raises(type(error)), writing(Path("a")):
        raise error
    assert storage_error(error) is None


# whose fault an error is ------------------------------------------------------------------------


def error_of(source: str, name: str) -> BaseException:
    try:
        exec(compile(source, name, "exec"), {})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_place_is_the_innermost_line_that_is_no_librarys() -> None:
    inner = "import json\n\njson.loads('{')"
    assert format_error(error_of(inner, "/home/me/project/attacks/mine.py")).endswith(
        "(char 1) (attacks/mine.py:3)"
    )
    installed = "/x/lib/python3.11/site-packages/attacks/april.py"
    assert format_error(error_of("1 / 0", installed)).endswith("(attacks/april.py:1)")
    other = "/x/lib/python3.11/site-packages/numpy/core.py"
    assert "numpy" not in format_error(error_of("1 / 0", other))
